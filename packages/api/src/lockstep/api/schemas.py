"""Request bodies: the fields that are served, and by name those that others serve and this server refuses.

Unknown fields are accepted, as by other servers, and noted in the debug log; with `strict` they are refused. A field of
REFUSED is known: it is accepted as long as it has a value that changes nothing, and refused by name otherwise.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(max_length=2**27)]
Name = Annotated[str, Field(max_length=256)]

Seconds = Annotated[float, Field(gt=0.0, le=1e6)]

NOTHING = (None, False, "", 0)

NO_GRAMMAR = "asks for structured output, and this engine has no grammar backend to keep to it; leave it out"
WHY = {
    "ebnf": NO_GRAMMAR,
    "guided_choice": NO_GRAMMAR,
    "guided_grammar": NO_GRAMMAR,
    "guided_json": NO_GRAMMAR,
    "guided_regex": NO_GRAMMAR,
    "json_schema": NO_GRAMMAR,
    "output_config": NO_GRAMMAR,
    "regex": NO_GRAMMAR,
    "response_format": NO_GRAMMAR,
    "structural_tag": NO_GRAMMAR,
    "structured_outputs": NO_GRAMMAR,
    "text": NO_GRAMMAR,
    "lora_path": "names an adapter, and this runtime has none; leave it out",
    "previous_response_id": "goes on from a stored answer, and this server stores none; send the whole conversation",
    "conversation": "names a stored conversation, and this server stores none; send the whole conversation",
    "store": "asks to keep the answer, and this server stores none; leave it out",
}
"""What is said of a known field that is not served, beside its name."""


def empty(value: Any) -> bool:
    """Whether a value says as much as if it were not there."""
    return value in NOTHING or value in ([], {})


class Body(BaseModel):
    """What all bodies have in common: no coercion between types, no NaN, no infinity."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Known fields that are not served, with the values beside nothing that change no answer."""


class StreamOptions(Body):
    """What a stream has beside tokens."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampling(Body):
    """Fields of everything that generates."""

    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    seed: Int64 | None = None
    stop: Text | list[Text] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]] | None = None
    allowed_token_ids: list[TokenId] | None = None
    logit_processors: dict[str, dict[str, Any]] | None = None  # those that the operator enabled: name and arguments


class Timed(Body):
    """How long an answer may take. The headers X-Queue-Timeout and X-Request-Timeout say the same of any request."""

    queue_timeout_s: Seconds | None = None  # until it begins to run
    timeout_s: Seconds | None = None  # until it ends


class OpenAI(Sampling, Timed):
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

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "bad_words": (),
        "bootstrap_host": (),
        "bootstrap_port": (),
        "bootstrap_room": (),
        "ebnf": (),
        "extra_key": (),
        "guided_choice": (),
        "guided_grammar": (),
        "guided_json": (),
        "guided_regex": (),
        "json_schema": (),
        "kv_transfer_params": (),
        "lora_path": (),
        "no_stop_trim": (),
        "regex": (),
        "response_format": ({"type": "text"},),
        "return_hidden_states": (),
        "return_tokens_as_token_ids": (),
        "session_params": (),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "stop_regex": (),
        "structural_tag": (),
        "structured_outputs": (),
        "thinking_token_budget": (),
        "truncate_prompt_tokens": (),
        "use_beam_search": (),
    }


class CompletionBody(OpenAI):
    """POST /v1/completions"""

    prompt: Text | list[Text] | list[TokenId] | list[list[TokenId]]
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    logprobs: Count | None = None
    add_special_tokens: bool = True

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {**OpenAI.REFUSED, "suffix": ()}


class ChatMessage(Body):
    """A message; what else it has is for the template, if it knows it."""

    role: Name
    content: Text | list[dict[str, Any]] | None = None
    name: Name | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: Name | None = None


class ChatBody(OpenAI):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        **OpenAI.REFUSED,
        "add_special_tokens": (),
        "audio": (),
        "chat_template": (),
        "chat_template_kwargs": (),
        "documents": (),
        "echo": (),
        "function_call": ("none",),
        "functions": (),
        "include_reasoning": (True,),
        "modalities": (["text"],),
        "prediction": (),
        "reasoning_effort": (),
        "separate_reasoning": (True,),
        "stream_reasoning": (True,),
        "web_search_options": (),
    }


class NativeSampling(Sampling):
    """`sampling_params` of /generate."""

    max_new_tokens: Count = 128
    min_new_tokens: Count = 0
    n: Annotated[int, Field(ge=1)] = 1
    sampling_seed: Int64 | None = None

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "ebnf": (),
        "json_schema": (),
        "no_stop_trim": (),
        "regex": (),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "stop_regex": (),
        "structural_tag": (),
    }


class SessionParams(Body):
    """Of which session a request is the next turn."""

    id: Name
    offset: Annotated[int, Field(ge=-1, lt=2**31)] | None = None  # tokens of it that stay in front; -1, None: all

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {"drop_previous_output": (), "replace": (), "rid": ()}


class GenerateBody(Timed):
    """POST /generate"""

    text: Text | list[Text] | None = None
    input_ids: list[TokenId] | list[list[TokenId]] | None = None
    sampling_params: NativeSampling = NativeSampling()
    return_logprob: bool = False
    logprob_start_len: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    top_logprobs_num: Count = 0
    stream: bool = False
    priority: Int64 | None = None
    rid: Name | None = None
    session_params: SessionParams | None = None

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "audio_data": (),
        "bootstrap_host": (),
        "bootstrap_room": (),
        "extra_key": (),
        "image_data": (),
        "input_embeds": (),
        "lora_path": (),
        "return_hidden_states": (),
        "return_text_in_logprobs": (),
        "token_ids_logprob": (),
        "video_data": (),
    }


class EmbeddingBody(Timed):
    """POST /v1/embeddings"""

    model: Name | None = None
    input: Text | list[Text] | list[TokenId] | list[list[TokenId]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    user: Name | None = None
    priority: Int64 | None = None
    add_special_tokens: bool = True

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "embed_dtype": ("float32",),
        "input_type": (),
        "instruction": (),
        "normalize": (),
        "truncate_prompt_tokens": (),
    }


class InputItem(Body):
    """One item of a response's input: a message."""

    type: Name = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Text | list[dict[str, Any]] | None = None


class ResponseBody(Sampling, Timed):
    """POST /v1/responses"""

    model: Name | None = None
    input: Text | Annotated[list[InputItem], Field(min_length=1)]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    stream: bool | None = None
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = None
    user: Name | None = None
    priority: Int64 | None = None
    cache_salt: Name | None = None

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "background": (),
        "context_management": (),
        "conversation": (),
        "include": (["reasoning.encrypted_content"],),  # there is no reasoning to encrypt
        "max_tool_calls": (),
        "moderation": (),
        "parallel_tool_calls": (True,),
        "previous_response_id": (),
        "prompt": (),
        "reasoning": (),
        "response_format": ({"type": "text"},),
        "store": (),
        "text": ({"format": {"type": "text"}}, {"format": None}),
        "tool_choice": ("auto", "none"),
        "tools": (),
        "top_logprobs": (),
        "truncation": ("disabled",),
    }


class MessageItem(Body):
    """One message of Anthropic's API."""

    role: Literal["user", "assistant", "system"]
    content: Text | list[dict[str, Any]]


class MessageMetadata(Body):
    """Who asks, in the client's words."""

    user_id: Name | None = None


class CountBody(Body):
    """POST /v1/messages/count_tokens"""

    model: Name | None = None
    messages: Annotated[list[MessageItem], Field(min_length=1)]
    system: Text | list[dict[str, Any]] | None = None

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "container": (),
        "context_management": (),
        "mcp_servers": (),
        "output_config": (),
        "output_format": (),
        "thinking": ({"type": "disabled"},),
        "tool_choice": ({"type": "auto"}, {"type": "none"}),
        "tools": (),
    }


class MessageBody(CountBody):
    """POST /v1/messages"""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    stop_sequences: list[Text] | None = None
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
    messages: list[ChatMessage] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True


class DetokenizeBody(Body):
    """POST /detokenize"""

    model: Name | None = None
    tokens: list[TokenId]


class AbortBody(Body):
    """POST /abort_request"""

    rid: Name


# -------------------------------------------------------------------------------------------------- sessions, operators


class OpenSessionBody(Body):
    """POST /open_session"""

    session_id: Name | None = None  # None: one that nobody can guess
    capacity_of_str_len: Annotated[
        int, Field(ge=2, lt=2**31)
    ]  # SGLang's name; in tokens, prompt and output of any turn
    timeout: Seconds | None = None  # closed by itself after so long without a turn; None: the most that is allowed
    parent: Name | None = None  # begins as that session stands
    parent_tokens: Count | None = None  # with so many of its tokens; None: all

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {"streaming": ()}


class CloseSessionBody(Body):
    """POST /close_session"""

    session_id: Name


class PauseBody(Body):
    """POST /pause"""

    mode: Literal["in_place", "retract", "cancel", "keep", "abort"] = "in_place"  # the last two are vLLM's names


class ProfileBody(Body):
    """POST /start_profile. Names are SGLang's where it has one."""

    start_step: Count | None = None
    num_steps: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    activities: list[Literal["CPU", "GPU"]] | None = None
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


class SlowDownBody(Body):
    """POST /slow_down"""

    forward_sleep_time: Annotated[float, Field(ge=0.0, le=60.0)] | None = None


class AnyBody(Body):
    """Whatever it is that nobody here can do."""
