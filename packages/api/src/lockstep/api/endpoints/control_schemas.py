"""Bodies of requests about the engine itself: sessions, and operations for operators only."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from lockstep.api.endpoints.field_types import Count, Items, Name
from lockstep.api.endpoints.schemas import Body, Seconds


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

    # admission: running requests go on, and new ones wait; the last two are vLLM's names
    mode: Literal["in_place", "retract", "cancel", "admission", "keep", "abort"] = "in_place"


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


class RpcBody(Body):
    """POST /collective_rpc"""

    method: Name
    args: list[Any] = Field(default_factory=list)
    kwargs: dict[str, Any] = Field(default_factory=dict)
    timeout: Annotated[float, Field(gt=0, le=86_400)] | None = None  # seconds until the answer is 504


class MemoryBody(Body):
    """POST /release_memory_occupation, /resume_memory_occupation"""

    tags: Items[Literal["kv_cache", "weights"]] | None = None


class SlowDownBody(Body):
    """POST /slow_down"""

    forward_sleep_time: Annotated[float, Field(ge=0.0, le=60.0)] | None = None
