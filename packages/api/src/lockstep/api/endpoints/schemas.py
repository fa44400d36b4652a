"""Request bodies: the fields that are served, and the names of fields that only other servers serve.

A field of COMFORT is known and not served, and its absence changes no answer: it is accepted, and `fields.py` names it
in a header and in the log. An unknown field is treated alike; with `strict` it is refused. A field of REFUSED would
change the answer: it is accepted with a value that changes none, and refused by name otherwise.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from lockstep.core.contract.text import CONTROLS

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(max_length=2**27)]
Name = Annotated[str, Field(max_length=256)]


def _check_label(value: str) -> str:
    """Check a client's name for its request. Logs and terminals show it, so control characters are refused."""
    for at, character in enumerate(value):
        if ord(character) in CONTROLS:
            raise ValueError(f"Character {at} is a control character, {CONTROLS[ord(character)]}; leave it out")
    return value


Label = Annotated[Name, AfterValidator(_check_label)]

ITEMS_MAX = 2**14
"""Greatest length of a list of objects (messages, parts, tools). Each object costs a microsecond or more to check."""

Item = TypeVar("Item")
Items = Annotated[list[Item], Field(max_length=ITEMS_MAX, fail_fast=True)]
"""A list with only its first error reported: a report of a million errors takes minutes, and gigabytes."""

Objects = Items[dict[str, Any]]


def _check_ids(value: Any) -> Sequence[int]:
    """Check a list of token ids, without a Python step for each. An array was checked by `text_jobs`."""
    if isinstance(value, array):
        return value
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise ValueError("Input should be a list of token ids")
    if value and not 0 <= min(value) <= max(value) < 2**31:
        raise ValueError(f"Token ids should be 0 to {2**31 - 1}")
    return value


def _check_texts(value: Any) -> str | list[str]:
    """Check a text, or a list of texts."""
    if isinstance(value, str) or (isinstance(value, list) and set(map(type, value)) <= {str}):
        return value
    raise ValueError("Input should be a text or a list of texts")


def _check_id_lists(value: Any) -> Sequence[Any]:
    """Check token ids, or a list of lists of token ids."""
    if isinstance(value, list) and value and set(map(type, value)) <= {list, array}:
        _check_ids(list(chain.from_iterable([one for one in value if isinstance(one, list)])))
        return value
    return _check_ids(value)


def _check_prompts(value: Any) -> str | Sequence[Any]:
    """Check a text, token ids, or a list of one kind of these."""
    kinds = set(map(type, value)) if isinstance(value, list) else {type(value)}
    if kinds == {int} or (kinds and kinds <= {list, array}):
        return _check_id_lists(value)
    if dict in kinds:
        raise ValueError("Objects, such as images, cannot be embedded here: give texts or token ids")
    if not isinstance(value, str) and not (isinstance(value, list) and kinds <= {str}):
        raise ValueError("Input should be a text, a list of texts, token ids, or a list of lists of token ids")
    return value


def _check_bias(value: Any) -> dict[str, float]:
    """Check biases of logits by token id, which is a text in JSON."""
    if not isinstance(value, dict) or not set(map(type, value.values())) <= {int, float}:
        raise ValueError("Input should be an object of numbers, by token id")
    if value and not -100.0 <= min(value.values()) <= max(value.values()) <= 100.0:
        raise ValueError("A bias should be -100 to 100")
    return value


def _check_arguments(value: Any) -> dict[str, dict[str, Any]]:
    """Check an object of objects."""
    if not isinstance(value, dict) or not set(map(type, value.values())) <= {dict}:
        raise ValueError("Input should be an object of objects, by name")
    return value


def _check_metadata(value: Any) -> dict[str, str]:
    """Check texts by name, within OpenAI's limits of number and length."""
    if not isinstance(value, dict) or len(value) > 16 or not set(map(type, value.values())) <= {str}:
        raise ValueError("Input should be an object of at most 16 texts")
    if any(len(name) > 64 or len(text) > 512 for name, text in value.items()):
        raise ValueError("Names should have at most 64 characters, texts 512")
    return value


def _check_documents(value: Any) -> list[Any]:
    """Check a list of texts or objects, without a Python step for each."""
    if not isinstance(value, list) or not set(map(type, value)) <= {str, dict}:
        raise ValueError("Input should be a list of texts")
    return value


TEXTS_SCHEMA: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
IDS_SCHEMA: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}}
ID_LISTS_SCHEMA: dict[str, Any] = {"anyOf": [IDS_SCHEMA, {"type": "array", "items": IDS_SCHEMA}]}
PROMPTS_SCHEMA = {"anyOf": [TEXTS_SCHEMA, ID_LISTS_SCHEMA]}
BIAS_SCHEMA = {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}

OBJECTS_SCHEMA = {"type": "object", "additionalProperties": {"type": "object"}}
DOCUMENTS_SCHEMA = {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "object"}]}}
METADATA_SCHEMA = {"type": "object", "maxProperties": 16, "additionalProperties": {"type": "string", "maxLength": 512}}

Arguments = Annotated[dict[str, dict[str, Any]], PlainValidator(_check_arguments), WithJsonSchema(OBJECTS_SCHEMA)]
Metadata = Annotated[dict[str, str], PlainValidator(_check_metadata), WithJsonSchema(METADATA_SCHEMA)]
Documents = Annotated[list[Any], PlainValidator(_check_documents), WithJsonSchema(DOCUMENTS_SCHEMA)]
TokenIdList = Annotated[Sequence[int], PlainValidator(_check_ids), WithJsonSchema(IDS_SCHEMA)]
TextOrTexts = Annotated[str | list[str], PlainValidator(_check_texts), WithJsonSchema(TEXTS_SCHEMA)]
IdLists = Annotated[Sequence[Any], PlainValidator(_check_id_lists), WithJsonSchema(ID_LISTS_SCHEMA)]
Prompts = Annotated[str | Sequence[Any], PlainValidator(_check_prompts), WithJsonSchema(PROMPTS_SCHEMA)]
Biases = Annotated[dict[str, float], PlainValidator(_check_bias), WithJsonSchema(BIAS_SCHEMA)]

Seconds = Annotated[float, Field(gt=0.0, le=1e6)]
EngineNumber = Annotated[int, Field(ge=0, lt=2**31)]
"""Number of an engine of `--dp N`, from 0; SGLang's and vLLM's engines of that kind are ranks."""
Truncation = Annotated[int, Field(ge=-1, lt=2**31)]
"""Greatest number of tokens of a prompt, whose first tokens are dropped; -1: as many as fit."""

EXPIRES_MIN_S, EXPIRES_MAX_S = 3600, 2_592_000
"""Bounds of `expires_after` of files, as at OpenAI."""

NOTHING = (None, False, "", 0)

PICKLED = "is a pickle, which may run code; put the tensors into shared memory as safetensors: `shared_memory`"
NOT_HERE = "which this server does not have"
EMBEDDED = "is not supported: prompts are tokens, so that a journal can repeat them"
WHY = {
    "serialized_named_tensors": PICKLED,
    "custom_logit_processor": "is a program, which clients may not send; `logit_processors` selects the operator's",
    "logits_processors": "are programs, which clients may not send; `logit_processors` selects the operator's",
    "response_format": "is a field of chat completions; the field of a response is `text.format`",
    "input_embeds": f"{EMBEDDED}; give `text` or `input_ids`",
    "prompt_embeds": f"{EMBEDDED}; give `prompt`",
    "embed_overrides": f"{EMBEDDED}; leave it out",
    "token_type_ids": f"is for cross-encoders, {NOT_HERE}; /score and /rerank compare vectors",
    "is_cross_encoder_request": f"is for cross-encoders, {NOT_HERE}; /score and /rerank compare vectors",
    "messages": f"is for models that embed conversations with images, {NOT_HERE}; give `input`",
    "abort_all": "is for operators: /abort_all on --admin-socket",
}
"""Known field that is not served -> the text of the error after its name."""


def empty(value: Any) -> bool:
    """Return whether a value has the same meaning as an absent field."""
    return value in NOTHING or value in ([], {})


class Body(BaseModel):
    """Base of all bodies: no coercion between types, no NaN, no infinity."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Known fields that are not served -> values, besides null, that change no answer.

    Empty values (false, 0, an empty text, list or object) change no answer either, unless the first of these values is
    True or None. With None as the only value, null alone changes no answer.
    """
    COMFORT: ClassVar[frozenset[str]] = frozenset()
    """Known fields that are not served and change no answer: they concern placement, billing, caching or display."""
    OPEN: ClassVar[bool] = False
    """Whether the handler decides about unknown fields."""
    PASSED_TO: ClassVar[tuple[type[Body], ...]] = ()
    """Schemas of other endpoints, one of which the handler applies to the body."""


TOKEN_IDS = frozenset((_check_ids, _check_id_lists, _check_prompts))


@cache
def id_fields(body: type[Body]) -> frozenset[str]:
    """Return the names of the fields of a body, and of bodies in it, that may have token ids."""
    found: set[str] = set()
    for name, one in body.model_fields.items():
        if any(isinstance(check, PlainValidator) and check.func in TOKEN_IDS for check in one.metadata):
            found.add(name)
        for kind in (one.annotation, *get_args(one.annotation)):
            if any(isinstance(inner, PlainValidator) and inner.func in TOKEN_IDS for inner in get_args(kind)[1:]):
                found.add(name)
            if isinstance(kind, type) and issubclass(kind, Body):
                found |= id_fields(kind)
    return frozenset(found).union(*map(id_fields, body.PASSED_TO))


@cache
def known_fields(body: type[Body]) -> frozenset[str]:
    """Return the names of the fields of a body, and of the schemas that it may be passed to."""
    return frozenset(body.model_fields).union(*map(known_fields, body.PASSED_TO))


class StreamOptions(Body):
    """Parts of a stream besides tokens."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampling(Body):
    """Sampling fields of all endpoints that generate tokens."""

    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    seed: Int64 | None = None
    stop: Text | Items[Text] | None = None
    stop_token_ids: TokenIdList | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    logit_bias: Biases | None = None
    allowed_token_ids: TokenIdList | None = None
    logit_processors: Arguments | None = None  # name of a processor that the operator enabled -> arguments
    stream_interval: Annotated[int, Field(ge=1, lt=2**31)] | None = None  # least new tokens in an event of a stream
    skip_special_tokens: bool | None = None  # false: special tokens are part of the text
    no_stop_trim: bool | None = None  # SGLang's name of `include_stop_str_in_output`
    stop_regex: Text | Items[Text] | None = None  # regular expressions that end the answer

    COMFORT: ClassVar[frozenset[str]] = frozenset({"spaces_between_special_tokens"})  # for tokenizers written in Python

    @property
    def shows_stop(self) -> bool:
        """Whether the text includes the stop text or stop token that ended the answer."""
        return bool(self.include_stop_str_in_output or self.no_stop_trim)


SchemaOrText = dict[str, Any] | bool | Text


class Structured(Body):
    """Fields that constrain the answer, read by `structured_output.py`. At most one of them may be set."""

    json_schema: SchemaOrText | None = None  # SGLang's names
    regex: Text | None = None
    ebnf: Text | None = None
    structural_tag: dict[str, Any] | Text | None = None


class StructuredOpenAI(Structured):
    """Fields that constrain the answer under the names of OpenAI and vLLM, including vLLM's older ones."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: Text | None = None
    guided_choice: Items[Text] | None = None
    guided_grammar: Text | None = None


class Timed(Body):
    """Time limits of an answer. The headers X-Queue-Timeout and X-Request-Timeout set the same limits."""

    queue_timeout_s: Seconds | None = None  # from arrival to the start of its run
    timeout_s: Seconds | None = None  # from arrival to its end


PLACEMENT = frozenset(
    {
        "data_parallel_rank_decode",
        "decode_tp_size",
        "disagg_prefill_dp_rank",
        "bootstrap_pair_key",
    }
)
"""Fields that select a rank or a pair of engines. The router of this server selects them."""

ACCOUNTS = frozenset(
    {
        "metadata",
        "moderation_metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
    }
)
"""Fields about accounts and caches of OpenAI. Prefixes are cached here in any case."""


ELSEWHERE: dict[str, tuple[Any, ...]] = dict.fromkeys(
    (
        "custom_params",
        "ec_transfer_params",
        "images_config",
        "logprob_token_ids",
        "media_io_kwargs",
        "mm_payload",
        "mm_processor_kwargs",
        "repetition_detection",
        "return_cached_tokens_details",
        "return_mm_kwargs",
        "return_routed_experts",
        "return_spec_tokens_details",
        "return_token_offsets",
        "routed_experts_prompt_start",
        "routed_experts_start_len",
        "vllm_xargs",
        "watermark",
        "watermarking",
    ),
    (),
)
"""Fields of vLLM and SGLang that change answers, of several endpoints."""


class OpenAI(Sampling, StructuredOpenAI, Timed):
    """Fields of both OpenAI endpoints."""

    model: Name | None = None
    max_tokens: Count | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Name | None = None
    priority: Int64 | None = None
    return_token_ids: bool | None = None
    cache_salt: Name | None = None
    prompt_logprobs: Count | None = None
    rid: Label | None = None  # SGLang's name for the id of the answer, by which it can also be cancelled
    request_id: Label | None = None  # vLLM's name for the id, used after `cmpl-` or `chatcmpl-`
    lora_path: Name | None = None  # name of an adapter, as in SGLang; `model` may contain it instead
    extra_key: Name | None = None  # SGLang's further part of `cache_salt`
    routing_key: Name | None = None  # requests with equal keys run together under the policy routing-key
    truncate_prompt_tokens: Truncation | None = None  # vLLM: the prompt's last tokens only
    bad_words: Items[Text] | None = None  # texts that the answer must not contain
    use_beam_search: bool | None = None  # vLLM: the `n` likeliest answers
    length_penalty: Annotated[float, Field(ge=-10.0, le=10.0)] | None = None  # of beams
    session_id: Name | None = None  # requests with equal ids run on one engine of several, as with X-Session-Id
    data_parallel_rank: EngineNumber | None = None  # engine of several that runs the request

    COMFORT: ClassVar[frozenset[str]] = (
        Sampling.COMFORT | PLACEMENT | ACCOUNTS | {"custom_labels", "return_weight_versions"}
    )
    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        **ELSEWHERE,
        "truncation_side": ("left",),
        "bootstrap_host": (),
        "bootstrap_port": (),
        "bootstrap_room": (),
        "custom_logit_processor": (),
        "guided_whitespace_pattern": (),
        "kv_transfer_params": (),
        "logits_processors": (),
        "prompt_embeds": (),
        "return_hidden_states": (),
        "return_tokens_as_token_ids": (),
        "session_params": (),
        "thinking_token_budget": (),
    }


class CompletionBody(OpenAI):
    """POST /v1/completions"""

    prompt: Prompts
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    logprobs: Count | None = None
    add_special_tokens: bool = True

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {**OpenAI.REFUSED, "suffix": ()}


class ChatMessage(Body):
    """A message. Further fields are passed to the chat template."""

    role: Name
    content: Text | Objects | None = None
    name: Name | None = None
    tool_calls: Objects | None = None
    tool_call_id: Name | None = None


class TemplateOptions(Body):
    """`chat_template_kwargs`: the variables of chat templates that clients may set."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    clear_thinking: bool | None = None
    preserve_thinking: bool | None = None
    thinking_budget: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    reasoning_effort: Name | None = None
    tools_in_user_message: bool | None = None


class ChatBody(OpenAI):
    """POST /v1/chat/completions"""

    messages: Annotated[Items[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tools: Objects | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    reasoning_effort: Name | None = None  # for a chat template that reads it
    separate_reasoning: bool | None = None  # false: thoughts remain in the content, with their tags
    include_reasoning: bool | None = None  # false: thoughts are split off and dropped
    stream_reasoning: bool | None = None  # false: a stream has thoughts in one piece
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        **OpenAI.REFUSED,
        "max_dynamic_patch": (),
        "min_dynamic_patch": (),
        "moderation": (),
        "return_flat_raw_output_top_logprobs": (),
        "return_flat_raw_top_logprobs_b64": (),
        "return_input_ids_in_sglext": (),
        "return_meta_info": (),
        "return_output_ids_in_sglext": (),
        "return_prompt_text": (),
        "return_prompt_token_ids": (),
        "return_sampling_mask": (),
        "sampling_logprobs_mode": (),
        "task": (),
        "thinking": (),
        "use_audio_in_video": (),
        "video_config": (),
        "add_special_tokens": (),
        "audio": (),
        "chat_template": (),
        "documents": (),
        "echo": (),
        "function_call": ("none",),
        "functions": (),
        "modalities": (["text"],),
        "input_ids": (),
        "web_search_options": (),
    }
    COMFORT: ClassVar[frozenset[str]] = OpenAI.COMFORT | {"prediction", "verbosity"}


Start = Annotated[int, Field(ge=-1, lt=2**31)]
OfEach = Annotated[list[Item], Field(max_length=4096, fail_fast=True)]
"""A list with a value for each prompt."""


class NativeSampling(Sampling, Structured):
    """`sampling_params` of /generate."""

    max_new_tokens: Count = 128
    min_new_tokens: Count = 0
    n: Annotated[int, Field(ge=1)] = 1
    sampling_seed: Int64 | None = None

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = dict.fromkeys(
        (
            "beam_width",
            "custom_params",
            "ebnf_full_assistant",
            "stop_regex_max_len",
            "stop_regex_strs",
            "stop_str_max_len",
            "stop_strs",
            "watermark",
        ),
        (),
    )


class SessionParams(Body):
    """The session that a request continues by a turn."""

    id: Name
    # tokens of the session kept before the prompt; -1, None: all
    offset: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    replace: bool | None = None  # true: the turn replaces all earlier ones, so no token of the session is kept
    drop_previous_output: bool | None = None  # true: the tokens up to the output of the last completed turn are kept

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {"rid": ()}


INTERNAL = frozenset(
    {
        "background",
        "conversation_id",
        "custom_labels",
        "external_trace_header",
        "http_worker_ipc",
        "kv_hints",
        "log_metrics",
        "need_wait_for_mm_inputs",
        "no_logs",
        "num_items_assigned",
        "received_time",
        "require_reasoning",
        "return_bytes",
    }
)
"""Fields with which processes of SGLang pass requests to each other, or that concern its log."""


class GenerateBody(Timed):
    """POST /generate"""

    text: TextOrTexts | None = None
    input_ids: IdLists | None = None
    sampling_params: NativeSampling | OfEach[NativeSampling] = NativeSampling()
    return_logprob: bool | OfEach[bool] | None = None
    # prompt position of the first logprob; -1, None: none of the prompt
    logprob_start_len: Start | OfEach[Start | None] | None = None
    top_logprobs_num: Count | OfEach[Count] | None = None
    # ids whose logprobs are given at each output position: a list for all prompts, or one for each prompt
    token_ids_logprob: IdLists | None = None
    return_text_in_logprobs: bool | None = None
    return_hidden_states: bool | OfEach[bool] | None = None
    stream: bool = False
    priority: Int64 | None = None
    rid: Label | OfEach[Label] | None = None
    session_params: SessionParams | None = None
    lora_path: Name | OfEach[Name | None] | None = None  # name of an adapter
    extra_key: Name | None = None  # prefixes are shared only among requests with the same key, as with `cache_salt`
    cache_salt: Name | None = None
    routing_key: Name | None = None  # requests with equal keys run together under the policy routing-key
    session_id: Name | None = None  # requests with equal ids run on one engine of several, as with X-Session-Id
    data_parallel_rank: EngineNumber | None = None  # engine of several that runs the request

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        **ELSEWHERE,
        "bootstrap_port": (),
        "encoder_urls": (),
        "image_max_dynamic_patch": (),
        "lora_id": (),
        "max_dynamic_patch": (),
        "max_thinking_tokens": (),
        "min_dynamic_patch": (),
        "mm_content_hashes": (),
        "mm_hashes": (),
        "modalities": (),
        "multi_item_delimiter_indices": (),
        "positional_embed_overrides": (),
        "return_entropy": (),
        "return_flat_raw_output_top_logprobs": (),
        "return_flat_raw_top_logprobs": (),
        "return_flat_raw_top_logprobs_b64": (),
        "return_indexer_topk": (),
        "return_prompt_token_ids": (),
        "return_sampling_mask": (),
        "sampling_logprobs_mode": (),
        "token_indices_to_pool": (),
        "use_audio_in_video": (),
        "video_config": (),
        "video_max_dynamic_patch": (),
        "audio_data": (),
        "bootstrap_host": (),
        "bootstrap_room": (),
        "custom_logit_processor": (),
        "image_data": (),
        "input_embeds": (),
        "video_data": (),
    }
    COMFORT: ClassVar[frozenset[str]] = PLACEMENT | INTERNAL


class EmbeddingBody(Timed):
    """POST /v1/embeddings"""

    model: Name | None = None
    input: Prompts | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    user: Name | None = None
    priority: Int64 | None = None
    data_parallel_rank: EngineNumber | None = None  # engine of several that runs the requests
    truncate_prompt_tokens: Truncation | None = None
    add_special_tokens: bool = True
    lora_path: Name | None = None  # name of an adapter

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "embed_override_token_id": (),
        "embed_overrides": (),
        "messages": (),
        "token_type_ids": (),
        "cache_salt": (),
        "padding": (),
        "truncation_side": ("left",),
        "use_activation": (),
        "endianness": ("native", "little"),
        "mm_processor_kwargs": (),
        "embed_dtype": ("float32",),
        "input_type": (),
        "instruction": (),
        "normalize": (None,),  # the model's pooling decides
    }
    COMFORT: ClassVar[frozenset[str]] = frozenset({"request_id", "rid"})


class ScoreBody(Timed):
    """POST /score, /v1/score: probabilities of labels after texts, or similarity of texts."""

    model: Name | None = None
    query: Prompts | None = None
    items: Prompts | None = None
    label_token_ids: TokenIdList | None = None
    apply_softmax: bool = False
    item_first: bool = False
    text_1: TextOrTexts | None = None
    text_2: TextOrTexts | None = None
    user: Name | None = None
    priority: Int64 | None = None
    data_parallel_rank: EngineNumber | None = None  # engine of several that runs the requests
    truncate_prompt_tokens: Truncation | None = None

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "embed_override_token_id": (),
        "item_embed_overrides": (),
        "query_embed_overrides": (),
        "return_pooled_hidden_states": (),
        "return_token_logprobs": (),
        "score_extraction_token": (),
        "temperature": (1.0,),
        "instruction": (),
        "mm_processor_kwargs": (),
    }


class RerankBody(Timed):
    """POST /rerank, /v1/rerank, /v2/rerank"""

    model: Name | None = None
    query: Text
    documents: Documents
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool = True
    user: Name | None = None
    priority: Int64 | None = None
    data_parallel_rank: EngineNumber | None = None  # engine of several that runs the requests
    truncate_prompt_tokens: Truncation | None = None

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "chat_template_kwargs": (),
        "max_tokens_per_query": (),
        "cache_salt": (),
        "padding": (),
        "truncation_side": ("left",),
        "use_activation": (),
        "instruct": (),
        "instruction": (),
        "max_chunks_per_doc": (),
        "max_tokens_per_doc": (),
        "mm_processor_kwargs": (),
    }
    COMFORT: ClassVar[frozenset[str]] = frozenset({"request_id"})


class InputItem(Body):
    """One item of a response's input: a message, a call, a call's result, or thoughts."""

    type: Name = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Text | Objects | None = None
    call_id: Name | None = None
    name: Name | None = None
    arguments: Text | None = None
    output: Text | Objects | None = None


class ReasoningOptions(Body):
    """`reasoning` of a response."""

    effort: Name | None = None  # for a chat template that reads `reasoning_effort`

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {"context": ("auto",)}
    COMFORT: ClassVar[frozenset[str]] = frozenset({"generate_summary", "summary"})


class TextSettings(Body):
    """`text` of a response: the format of its text."""

    format: dict[str, Any] | None = None

    COMFORT: ClassVar[frozenset[str]] = frozenset({"verbosity"})


class ResponseBody(Sampling, Timed):
    """POST /v1/responses"""

    model: Name | None = None
    input: Text | Annotated[Items[InputItem], Field(min_length=1)]
    instructions: Text | None = None
    text: TextSettings | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    tools: Objects | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: TemplateOptions | None = None
    stream: bool | None = None
    store: bool | None = None  # false: the answer cannot be fetched later
    background: bool | None = None  # true: the request returns at once, and the answer is fetched later
    previous_response_id: Name | None = None  # id of a stored answer, which this answer continues
    conversation: Name | dict[str, Any] | None = None  # a stored conversation, which this answer continues and extends
    metadata: Metadata | None = None
    user: Name | None = None
    priority: Int64 | None = None
    extra_key: Name | None = None  # SGLang's further part of `cache_salt`
    routing_key: Name | None = None  # requests with equal keys run together under the policy routing-key
    session_id: Name | None = None  # requests with equal ids run on one engine of several, as with X-Session-Id
    data_parallel_rank: EngineNumber | None = None  # engine of several that runs the request
    cache_salt: Name | None = None

    include: Items[Name] | None = None  # `message.output_text.logprobs`; the other values have no effect
    top_logprobs: Count | None = None
    truncation: Literal["auto", "disabled"] | None = None  # auto: the oldest messages that do not fit are dropped

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        **ELSEWHERE,
        "bootstrap_host": (),
        "bootstrap_port": (),
        "bootstrap_room": (),
        "enable_response_messages": (),
        "image": (),
        "include_reasoning": (),
        "kv_transfer_params": (),
        "moderation": (),
        "previous_input_messages": (),
        "prompt": (),
        "response_format": ({"type": "text"},),
        "structured_outputs": (),
    }
    COMFORT: ClassVar[frozenset[str]] = (
        Sampling.COMFORT
        | PLACEMENT
        | (ACCOUNTS - {"metadata", "store"})
        | {
            "access_programs",
            "background_options",
            "client_metadata",
            "context_management",
            "max_tool_calls",
            "request_id",
            "stream_options",
        }
    )


ITEMS_AT_ONCE = 20
"""Most items that one request adds to a conversation, as at OpenAI."""


class ConversationItemsBody(Body):
    """POST /v1/conversations/{id}/items"""

    items: Annotated[list[InputItem], Field(min_length=1, max_length=ITEMS_AT_ONCE, fail_fast=True)]


class ConversationBody(Body):
    """POST /v1/conversations"""

    items: Annotated[list[InputItem], Field(max_length=ITEMS_AT_ONCE, fail_fast=True)] | None = None
    metadata: Metadata | None = None


class MetadataBody(Body):
    """POST /v1/conversations/{id}"""

    metadata: Metadata | None = None


class MessageItem(Body):
    """One message of Anthropic's API."""

    role: Literal["user", "assistant", "system"]
    content: Text | Objects


class MessageMetadata(Body):
    """Metadata of a request: the end user, as named by the client."""

    user_id: Name | None = None


class MessageToolChoice(Body):
    """Whether a tool must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the answer has thoughts; for chat templates that read `enable_thinking` or `thinking`."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None  # a hint for chat templates that read `thinking_budget`

    COMFORT: ClassVar[frozenset[str]] = frozenset({"display"})


class OutputConfig(Body):
    """`output_config` of a message: effort, and the format of the answer."""

    effort: Name | None = None  # for a chat template that reads `reasoning_effort`
    format: dict[str, Any] | None = None  # {"type": "json_schema", "schema": ...}

    COMFORT: ClassVar[frozenset[str]] = frozenset({"task_budget"})


class CountBody(Body):
    """POST /v1/messages/count_tokens"""

    model: Name | None = None
    messages: Annotated[Items[MessageItem], Field(min_length=1)]
    system: Text | Objects | None = None
    tools: Objects | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None  # earlier name of `output_config.format`

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        **ELSEWHERE,
        "bootstrap_host": (),
        "bootstrap_port": (),
        "bootstrap_room": (),
        "chat_template_kwargs": (),
        "container": (),
        "kv_transfer_params": (),
        "mcp_servers": (),
        "thread": (),
    }
    COMFORT: ClassVar[frozenset[str]] = PLACEMENT | {
        "betas",
        "billing_policy",
        "cache_control",
        "compaction",
        "context_management",
        "diagnostics",
        "fallback_credit_token",
        "fallbacks",
        "inference_geo",
        "service_tier",
        "speed",
        "user_profile_id",
        "workspace_id",
    }


class MessageBody(CountBody):
    """POST /v1/messages"""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    stop_sequences: Items[Text] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    metadata: MessageMetadata | None = None
    cache_salt: Name | None = None
    priority: Int64 | None = None
    routing_key: Name | None = None  # requests with equal keys run together under the policy routing-key
    session_id: Name | None = None  # requests with equal ids run on one engine of several, as with X-Session-Id
    data_parallel_rank: EngineNumber | None = None  # engine of several that runs the request
    queue_timeout_s: Seconds | None = None
    timeout_s: Seconds | None = None


class TokenizeBody(Body):
    """POST /tokenize, of a prompt or of a conversation"""

    model: Name | None = None
    prompt: TextOrTexts | None = None  # of several texts, the answer has a list for each
    messages: Annotated[Items[ChatMessage], Field(min_length=1)] | None = None
    tools: Objects | None = None
    chat_template_kwargs: TemplateOptions | None = None
    reasoning_effort: Name | None = None  # for a chat template that reads it
    add_special_tokens: bool | None = None  # for a prompt; a chat template contains its special tokens
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    truncate_prompt_tokens: Truncation | None = None
    return_token_strs: bool | None = None

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "media_io_kwargs": (),
        "chat_template": (),
        "documents": (),
        "mm_processor_kwargs": (),
    }
    COMFORT: ClassVar[frozenset[str]] = frozenset({"tool_choice"})


class DetokenizeBody(Body):
    """POST /detokenize"""

    model: Name | None = None
    tokens: IdLists  # of several texts, a list for each
    skip_special_tokens: bool | None = None  # false: special tokens are part of the text


class AbortManyBody(Body):
    """POST /abort_requests"""

    request_ids: Items[Label]


class EncodeBody(Timed):
    """POST /encode"""

    text: TextOrTexts | None = None
    input_ids: IdLists | None = None
    rid: Label | OfEach[Label] | None = None
    priority: Int64 | None = None
    data_parallel_rank: EngineNumber | None = None  # engine of several that runs the requests
    truncate_prompt_tokens: Truncation | None = None
    lora_path: Name | None = None

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "audio_data": (),
        "image_data": (),
        "input_embeds": (),
        "is_cross_encoder_request": (),
        "video_data": (),
    }


class AbortBody(Body):
    """POST /abort_request"""

    rid: Label

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {"abort_all": ()}


class ExpiresAfter(Body):
    """When the files of results expire."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=EXPIRES_MIN_S, le=EXPIRES_MAX_S)]


class BatchBody(Body):
    """POST /v1/batches"""

    input_file_id: Name
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class AnyBody(Body):
    """A body whose fields are those of another endpoint, or of an endpoint that this server does not have."""

    OPEN: ClassVar[bool] = True
