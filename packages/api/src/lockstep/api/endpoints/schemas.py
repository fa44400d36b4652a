"""Request bodies: the fields that are served, and the names of fields that only other servers serve.

Unknown fields are accepted, as in other servers, and written to the debug log; with `strict` they are refused. A field
of REFUSED is known: it is accepted with a value that changes no answer, and refused by name otherwise.
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

NOTHING = (None, False, "", 0)

PICKLED = "is a pickle, which may run code; put the tensors into shared memory as safetensors: `shared_memory`"
WHY = {
    "serialized_named_tensors": PICKLED,
    "custom_logit_processor": "is a program, which clients may not send; `logit_processors` selects the operator's",
    "logits_processors": "are programs, which clients may not send; `logit_processors` selects the operator's",
    "conversation": "names a stored conversation, and this server has none; `previous_response_id` continues an answer",
    "response_format": "is a field of chat completions; the field of a response is `text.format`",
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
    return frozenset(found)


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

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "bad_words": (),
        "bootstrap_host": (),
        "bootstrap_port": (),
        "bootstrap_room": (),
        "custom_logit_processor": (),
        "extra_key": (),
        "guided_whitespace_pattern": (),
        "kv_transfer_params": (),
        "length_penalty": (1.0,),
        "logits_processors": (),
        "no_stop_trim": (),
        "prompt_embeds": (),
        "return_hidden_states": (),
        "return_tokens_as_token_ids": (),
        "session_params": (),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "stop_regex": (),
        "thinking_token_budget": (),
        "truncate_prompt_tokens": (),
        "use_beam_search": (),
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
        "add_special_tokens": (),
        "audio": (),
        "chat_template": (),
        "documents": (),
        "echo": (),
        "function_call": ("none",),
        "functions": (),
        "modalities": (["text"],),
        "input_ids": (),
        "mm_processor_kwargs": (),
        "prediction": (),
        "verbosity": ("medium",),
        "web_search_options": (),
    }


class NativeSampling(Sampling, Structured):
    """`sampling_params` of /generate."""

    max_new_tokens: Count = 128
    min_new_tokens: Count = 0
    n: Annotated[int, Field(ge=1)] = 1
    sampling_seed: Int64 | None = None

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "no_stop_trim": (),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "stop_regex": (),
    }


class SessionParams(Body):
    """The session that a request continues by a turn."""

    id: Name
    # tokens of the session kept before the prompt; -1, None: all
    offset: Annotated[int, Field(ge=-1, lt=2**31)] | None = None

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {"drop_previous_output": (), "replace": (), "rid": ()}


class GenerateBody(Timed):
    """POST /generate"""

    text: TextOrTexts | None = None
    input_ids: IdLists | None = None
    sampling_params: NativeSampling = NativeSampling()
    return_logprob: bool = False
    logprob_start_len: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    top_logprobs_num: Count = 0
    stream: bool = False
    priority: Int64 | None = None
    rid: Label | None = None
    session_params: SessionParams | None = None
    lora_path: Name | None = None  # name of an adapter

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "audio_data": (),
        "bootstrap_host": (),
        "bootstrap_room": (),
        "custom_logit_processor": (),
        "extra_key": (),
        "image_data": (),
        "input_embeds": (),
        "return_hidden_states": (),
        "return_text_in_logprobs": (),
        "token_ids_logprob": (),
        "video_data": (),
    }


class EmbeddingBody(Timed):
    """POST /v1/embeddings"""

    model: Name | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    user: Name | None = None
    priority: Int64 | None = None
    add_special_tokens: bool = True

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "embed_dtype": ("float32",),
        "input_type": (),
        "instruction": (),
        "normalize": (None,),  # the model's pooling decides
        "truncate_prompt_tokens": (),
    }


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

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "instruction": (),
        "mm_processor_kwargs": (),
        "truncate_prompt_tokens": (),
    }


class RerankBody(Timed):
    """POST /rerank, /v1/rerank, /v2/rerank"""

    model: Name | None = None
    query: Text
    documents: Annotated[
        list[Text | dict[str, Any]], PlainValidator(_check_documents), WithJsonSchema(DOCUMENTS_SCHEMA)
    ]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool = True
    user: Name | None = None
    priority: Int64 | None = None

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "instruct": (),
        "instruction": (),
        "max_chunks_per_doc": (),
        "max_tokens_per_doc": (),
        "mm_processor_kwargs": (),
        "truncate_prompt_tokens": (),
    }


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

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "context": (),
        "generate_summary": (),
        "summary": (),
    }


class TextSettings(Body):
    """`text` of a response: the format of its text."""

    format: dict[str, Any] | None = None

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {"verbosity": ("medium",)}


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
    metadata: Metadata | None = None
    user: Name | None = None
    priority: Int64 | None = None
    cache_salt: Name | None = None

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "context_management": (),
        "conversation": (),
        "include": (["reasoning.encrypted_content"],),  # thoughts are never encrypted
        "max_tool_calls": (),
        "moderation": (),
        "prompt": (),
        "response_format": ({"type": "text"},),
        "top_logprobs": (),
        "truncation": ("disabled",),
    }


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

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {"display": ("summarized",)}


class CountBody(Body):
    """POST /v1/messages/count_tokens"""

    model: Name | None = None
    messages: Annotated[Items[MessageItem], Field(min_length=1)]
    system: Text | Objects | None = None
    tools: Objects | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "container": (),
        "context_management": (),
        "mcp_servers": (),
        "output_config": (),
        "output_format": (),
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
    queue_timeout_s: Seconds | None = None
    timeout_s: Seconds | None = None


class TokenizeBody(Body):
    """POST /tokenize, of a prompt or of a conversation"""

    model: Name | None = None
    prompt: Text | None = None
    messages: Annotated[Items[ChatMessage], Field(min_length=1)] | None = None
    tools: Objects | None = None
    chat_template_kwargs: TemplateOptions | None = None
    reasoning_effort: Name | None = None  # for a chat template that reads it
    add_special_tokens: bool | None = None  # for a prompt; a chat template contains its special tokens
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool | None = None

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "chat_template": (),
        "documents": (),
        "mm_processor_kwargs": (),
        "truncate_prompt_tokens": (),
    }


class DetokenizeBody(Body):
    """POST /detokenize"""

    model: Name | None = None
    tokens: TokenIdList

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {"skip_special_tokens": (True,)}


class AbortBody(Body):
    """POST /abort_request"""

    rid: Label

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {"abort_all": ()}


# -------------------------------------------------------------------------------------------------- sessions, operators


class OpenSessionBody(Body):
    """POST /open_session"""

    session_id: Name | None = None  # None: a random id
    # SGLang's name: the greatest number of tokens, prompt and output, of any turn
    capacity_of_str_len: Annotated[int, Field(ge=2, lt=2**31)]
    timeout: Seconds | None = None  # time without a turn until the session is closed; None: the longest allowed
    parent: Name | None = None  # session from which this session is branched
    parent_tokens: Count | None = None  # number of the parent's tokens to keep; None: all

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {"streaming": ()}


class CloseSessionBody(Body):
    """POST /close_session"""

    session_id: Name


class PauseBody(Body):
    """POST /pause"""

    mode: Literal["in_place", "retract", "cancel", "keep", "abort"] = "in_place"  # the last two are vLLM's names


class ProfileBody(Body):
    """POST /start_profile. Fields that SGLang has too have its names."""

    start_step: Count | None = None
    num_steps: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    activities: Items[Literal["CPU", "GPU"]] | None = None
    record_shapes: bool | None = None
    with_stack: bool | None = None
    profile_by_stage: bool | None = None

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "merge_profiles": (),
        "output_dir": (),
        "profile_prefix": (),
        "profile_stages": (),
    }


class StateBody(Body):
    """POST /set_internal_state: settings of the scheduler that may change at run time"""

    server_args: dict[Name, float | int | None]


Version = Annotated[int, Field(ge=1, lt=2**53)] | Annotated[str, Field(pattern=r"^[1-9][0-9]{0,14}$")]
"""A weights version: an ascending integer, also as text, as in SGLang."""


class WeightsBody(Body):
    """Common fields of weight updates. The default of `mode` is wait, or in_place for a paused engine."""

    weight_version: Version | None = None  # above all earlier versions; None: the next version
    mode: Literal["wait", "retract", "cancel", "in_place", "keep", "abort"] | None = None
    abort_all_requests: bool = False  # SGLang's name for mode cancel


class WeightsFromDiskBody(WeightsBody):
    """POST /update_weights_from_disk"""

    model_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_format: Literal["auto", "safetensors"] | None = None


class WeightsFromTensorBody(WeightsBody):
    """POST /update_weights_from_tensor"""

    shared_memory: Name  # NAME of /dev/shm/NAME, a safetensors file; the process that made the file removes it

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "load_format": ("auto", "safetensors"),
        "serialized_named_tensors": (),
    }


class JoinGroupBody(Body):
    """POST /init_weights_update_group: rank 0 is the trainer, and engine N has rank `rank_offset` + N"""

    master_address: Annotated[str, Field(min_length=1, max_length=256)]
    master_port: Annotated[int, Field(ge=1, lt=65536)]
    rank_offset: Annotated[int, Field(ge=1, lt=2**15)] = 1
    world_size: Annotated[int, Field(ge=2, lt=2**15)]
    group_name: Name = "weights"
    backend: Literal["gloo", "nccl"] = "gloo"


class LeaveGroupBody(Body):
    """POST /destroy_weights_update_group"""

    group_name: Name = "weights"


class WeightsFromGroupBody(WeightsBody):
    """POST /update_weights_from_distributed: tensors in the order in which the trainer sends them"""

    names: Items[Name]
    dtypes: Items[Name]
    shapes: Items[Annotated[list[Count], Field(max_length=8)]]
    group_name: Name = "weights"


class LoadLoraBody(Body):
    """POST /load_lora_adapter. Names are those of vLLM and SGLang."""

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]  # a folder in PEFT's format
    pinned: bool = False  # whether the adapter stays on the device
    load_inplace: bool = False  # whether it replaces a loaded adapter as a newer version

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {"is_3d_lora_weight": ()}


class UnloadLoraBody(Body):
    """POST /unload_lora_adapter"""

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]


class WeightsByNameBody(Body):
    """POST /get_weights_by_name"""

    name: Name
    truncate_size: Annotated[int, Field(ge=1, lt=2**31)] = 100  # rows


class MemoryBody(Body):
    """POST /release_memory_occupation, /resume_memory_occupation"""

    tags: Items[Literal["kv_cache", "weights"]] | None = None


class SlowDownBody(Body):
    """POST /slow_down"""

    forward_sleep_time: Annotated[float, Field(ge=0.0, le=60.0)] | None = None


class AnyBody(Body):
    """The body of an endpoint of other servers that this server does not have."""
