"""Settings of `lockstep serve`: flags override one TOML file, which overrides the defaults.

The launcher writes them as JSON into the folder of the server's sockets; the other processes read them there.
"""

from __future__ import annotations

import ipaddress
import json
import re
import tomllib
from copy import copy
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

import msgspec

from lockstep.api.observability.logs import LogFormat
from lockstep.api.text.chat_formats.tables import THOUGHTS, TOOL_FORMATS
from lockstep.core.cluster.dispatch import DispatchConfig
from lockstep.core.cluster.router import RouterConfig, RouterPolicy, policy_settings
from lockstep.core.contract.config import PP_SIZE_MAX, SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.core.contract.runtime_settings import refuse_in_runtime
from lockstep.core.contract.setting import setting_fields
from lockstep.host.admission_options import parse_admission
from lockstep.host.answer_folders import ANSWERS
from lockstep.host.engine_options import EngineOptions, RankOptions
from lockstep.host.layout_options import check_layout
from lockstep.host.options import Option, options_of
from lockstep.host.tier_options import check_tiers

LOOPBACK = ("localhost", "127.0.0.1")
ORIGIN = re.compile(r"https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?|https?://\[[0-9a-fA-F:]+\](:[0-9]{1,5})?")
EMULATED_TOO = (
    "tp",
    "kv_cache_dtype",
    "fp8_activations",
    "mem_fraction",
    "max_lora_rank",
    "seed",
    "grammar_backend",
    "batch_timeout_s",
)
OF_A_MODEL = tuple(name for name in options_of(EngineOptions) if name not in EMULATED_TOO)
"""Options of engines with a model. An emulated engine rejects them."""
AT_MOST = {
    "port": 65535,
    "dp": 256,
    "api_workers": 256,
    "text_processes": 64,
    "tp": 1024,
    "pp": PP_SIZE_MAX,
    "attention_dp": 256,
    "seed": 2**63 - 1,
    "random_weights": 2**63 - 1,
    "answer_tokens": 2**31 - 1,
    "max_lora_rank": 512,
}
ROUTER_SETTINGS = ("router", *(f"router_{name}" for name in policy_settings()), "admission")
"""Options of a server with several engines."""
USUAL_ROUTER = RouterConfig()


def router_option(name: str) -> Option:
    """The option of a setting of the router, by its name in RouterConfig."""
    setting = policy_settings()[name]
    return Option(f"Under {setting.policy}: {setting.help}.")


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits of requests, workers and tenants. Those of a request are checked before it is tokenised or copied."""

    body_bytes_max: int = 32 * 2**20  # of one request with prompts; bodies of other routes have 64 KiB or 1 MiB
    bodies_bytes_max: int = 512 * 2**20  # of all bodies that one worker receives at the same time
    ids_max: int = 2**22  # token ids of one body that is larger than 64 KiB
    embedding_numbers_max: int = 2**22  # numbers of given embeddings in one body that is larger than 64 KiB
    values_max: int = 2**15  # JSON values of one body, where a list of token ids is one value
    prompts_max: int = 256  # in one request
    answers_max: int = 512  # prompts times samples, in one request
    samples_max: int = 128  # n
    stops_max: int = 16
    stop_characters_max: int = 512  # of one stop text
    regex_states_max: int = 2048  # states of stop expressions times answers, in one request
    bad_words_max: int = 128
    logprobs_max: int = 20
    logit_bias_max: int = 1024
    messages_max: int = 4096
    images_max: int = 16  # of one request
    image_bytes_max: int = 20 * 2**20  # of one image as sent
    image_pixels_max: int = 40_000_000  # width times height of one image
    audios_max: int = 8  # audio clips of one request
    audio_bytes_max: int = 20 * 2**20  # of one audio clip as sent
    audio_seconds_max: float = 600.0  # length of one audio clip
    videos_max: int = 4  # of one request
    video_bytes_max: int = 100 * 2**20  # of one video as sent
    video_seconds_max: float = 600.0  # length of one video
    video_frames_max: int = 128  # that a model gets of one video, which are spread over its time
    video_pixels_max: int = 300_000_000  # of these frames together
    media_bytes_max: int = 2**30  # of the media of one worker's open requests, as their encoder gets them
    media_fetch_s: float = 10.0  # time to fetch one medium, redirects included
    template_s: float = 10.0  # time in which a chat template must render one conversation
    allowed_tokens_max: int = 65536
    processors_max: int = 16
    grammar_bytes_max: int = 256 * 2**10  # of a schema, a regular expression or a grammar
    grammar_work_max: int = 256 * 2**10  # characters of grammars times answers, in one request
    grammar_depth_max: int = 64  # levels of a schema
    requests_max: int = 4096  # open answers of one worker
    waiting_max: int = 2048  # open answers of one worker for which the engine has sent nothing yet
    waiting_tokens_max: int = 4 * 2**20  # prompt tokens of these answers
    connections_max: int = 8192  # open connections of one worker, idle ones included
    head_s: float = 10.0  # from the opening of a connection, or the first byte of a later request, to the head's end
    body_s: float = 60.0  # from the end of the head to the end of the body
    detokenize_max: int = 2**20  # tokens in one request to /detokenize
    session_tokens_max: int = 2**20
    session_idle_s: float = 3600.0  # greatest time that a session waits for its next turn, and the default
    responses_bytes_max: int = 64 * 2**20  # stored answers of one tenant, with the conversations before them
    response_kept_s: float = 86_400.0  # time from the end of an answer until it is deleted
    kept_bytes_max: int = 64 * 2**20  # kept answers of one tenant, and one of them
    kept_s: float = 3600.0  # time from the end of a kept answer until it is deleted
    kept_unread_s: float = 300.0  # time after which a kept answer in progress is cancelled if nothing reads it
    file_bytes_max: int = 64 * 2**20  # of one uploaded file
    files_bytes_max: int = 256 * 2**20  # files of one tenant, those of batches included
    file_kept_s: float = 30 * 86_400.0  # time until a file expires
    batch_requests_max: int = 50_000  # in one batch
    batch_open_max: int = 32  # requests of one batch at the same time
    batches_max: int = 16  # batches of one tenant in progress

    def __post_init__(self) -> None:
        for one in msgspec.structs.fields(Limits):
            if not 0 < getattr(self, one.name) < 2**53:
                raise ConfigError(f"`limits.{one.name}` must be above 0, and finite, got `{getattr(self, one.name)}`")


class ServeSettings(EngineOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of a server, which include those of an engine. Names are those of the flags, with _ for -."""

    model: Annotated[
        str | None,
        Option(
            "A Hugging Face folder, a GGUF file, or smollm2, which is fetched; the demo model without it.",
            metavar="MODEL",
        ),
    ] = None
    emulate: Annotated[
        str | None, Option("Serve a cost model in real time; no torch, no weights.", metavar="MODEL@GPU")
    ] = None
    served_model_name: Annotated[
        tuple[str, ...], Option("Name of the model for clients; may be repeated, and answers contain the first.")
    ] = ()
    tokenizer: Annotated[
        str | None, Option("A folder with tokenizer.json, if not that of the model.", metavar="DIR")
    ] = None
    journal: Annotated[str | None, Option("Folder of the journal of all facts and decisions.", metavar="DIR")] = None
    set: dict[str, Any] = msgspec.field(default_factory=dict)  # settings of the scheduler, by field of SchedConfig

    # several engines behind a router: docs/routing.md
    dp: Annotated[
        int, Option("Engines behind a router, each with its own journal and, on GPUs, its own --tp GPUs.")
    ] = 1
    prefill_engines: Annotated[
        int, Option("Engines that compute prompts, for --decode-engines: docs/distributed.md; 0: engines do both.")
    ] = 0
    decode_engines: Annotated[int, Option("Engines that continue behind the prompts of --prefill-engines.")] = 0
    prefill_tp: Annotated[int | None, Option("--tp of prefill engines.", metavar="GPUS", default="as --tp")] = None
    decode_tp: Annotated[int | None, Option("--tp of decode engines.", metavar="GPUS", default="as --tp")] = None
    prefill_pp: Annotated[int | None, Option("--pp of prefill engines.", metavar="STAGES", default="as --pp")] = None
    decode_pp: Annotated[int | None, Option("--pp of decode engines.", metavar="STAGES", default="as --pp")] = None
    prefill_attention_dp: Annotated[
        int | None, Option("--attention-dp of prefill engines.", metavar="RANKS", default="as --attention-dp")
    ] = None
    decode_attention_dp: Annotated[
        int | None, Option("--attention-dp of decode engines.", metavar="RANKS", default="as --attention-dp")
    ] = None
    router: Annotated[RouterPolicy, Option("Policy that assigns requests to engines: docs/routing.md.")] = (
        USUAL_ROUTER.policy
    )
    router_load_bound: Annotated[float, router_option("load_bound")] = USUAL_ROUTER.load_bound
    router_load_floor: Annotated[int, router_option("load_floor")] = USUAL_ROUTER.load_floor
    router_block_tokens: Annotated[int, router_option("block_tokens")] = USUAL_ROUTER.block_tokens
    router_sessions_max: Annotated[int, router_option("sessions_max")] = USUAL_ROUTER.sessions_max
    admission: Annotated[
        str | None, Option("Waiting queue of the router, such as open=64,share.a=2: docs/routing.md.", metavar="SPEC")
    ] = None

    # the model
    allowed_local_media_path: Annotated[
        str | None,
        Option(
            "Folder whose files clients may name as media, by file:// URLs; none without it.",
            metavar="DIR",
        ),
    ] = None
    allowed_media_domains: Annotated[
        tuple[str, ...],
        Option(
            "Host from which media may be fetched over HTTP, * for all public ones; may be repeated; none without it."
        ),
    ] = ()
    grammar_compile_s: Annotated[float, Option("CPU seconds that compiling one grammar may take.")] = 2.0
    grammar_compile_mb: Annotated[int, Option("MiB of memory that compiling one grammar may take.")] = 512
    lora: dict[str, str] = msgspec.field(default_factory=dict)  # LoRA adapters: name -> folder as written by PEFT
    profile_dir: Annotated[
        str | None, Option("Folder for traces of CPU and GPU that operators request.", metavar="DIR")
    ] = None

    rpc_functions: Annotated[
        tuple[str, ...],
        Option(
            "Function of an installed package that operators may call by /collective_rpc; may be repeated.",
            flag="--rpc-function",
            metavar="NAME",
        ),
    ] = ()

    calibration: Annotated[
        str | None, Option("Predict batch times by it; /metrics reports the deviation. Emulated: it sets batch times.")
    ] = None

    # an emulated engine
    engine: Annotated[
        str | None,
        Option("Emulated: engine whose costs batches have, vllm by default: docs/serving.md. none: kernels alone."),
    ] = None
    profile: Annotated[
        str | None,
        Option("Emulated: scheduler settings: lockstep, sglang, vllm; by default those of --engine, else lockstep."),
    ] = None
    speed: Annotated[float, Option("Emulated: factor by which batches are faster than predicted.")] = 1.0
    answer_tokens: Annotated[int, Option("Emulated: mean tokens of an answer; 0: no answer ends by itself.")] = 256
    answers: Annotated[
        str | None,
        Option("Emulated: file of prepared answers and their prompts: docs/serving.md.", metavar="FILE"),
    ] = None

    # tool calls and thoughts in chats: a format's name, auto (the format in the chat template) or none
    tool_call_parser: Annotated[
        str, Option("Format of tool calls: hermes, mistral, ...; auto: by the chat template.")
    ] = "auto"
    reasoning_parser: Annotated[
        str, Option("Format of thoughts: qwen3, deepseek_r1, ...; auto: by the chat template.")
    ] = "auto"

    # HTTP
    host: Annotated[str, Option("Address to listen on. Beyond loopback it needs --api-keys.")] = "127.0.0.1"
    port: Annotated[int, Option("Port to listen on; 0 takes a free one.")] = 8000
    allowed_hosts: Annotated[
        tuple[str, ...],
        Option(
            "Host name of requests from a proxy, for a server without keys; may be repeated.", flag="--allowed-host"
        ),
    ] = ()
    api_workers: Annotated[int, Option("Processes that serve HTTP.")] = 1
    text_processes: Annotated[
        int, Option("Processes of each API worker that read large requests; started when they are needed.")
    ] = 2
    api_keys: Annotated[str | None, Option("TOML file of keys and their tenants.", metavar="FILE")] = None
    usage_dir: Annotated[
        str | None, Option("Folder in which the usage of tenants is stored beyond the server's end.", metavar="DIR")
    ] = None
    admin_socket: Annotated[
        str | None, Option("Unix socket of the routes for operators; without it these routes are off.")
    ] = None
    strict: Annotated[bool, Option("Reject requests with unknown fields.")] = False
    stored_responses: Annotated[int, Option("Stored answers of /v1/responses per tenant; 0: none.")] = 1000
    kept_answers: Annotated[
        int, Option("Answers per tenant that can be taken up again or repeated: docs/serving.md; 0: none.")
    ] = 256
    stored_files: Annotated[int, Option("Files per tenant, and batches, of /v1/files and /v1/batches; 0: none.")] = 1000
    cors_origins: Annotated[
        tuple[str, ...],
        Option(
            "Origin whose web pages may call the server, such as https://chat.example; may be repeated.",
            flag="--cors-origin",
        ),
    ] = ()
    metrics_compat: Annotated[
        tuple[str, ...],
        Option("Export metrics also under the names of vllm or sglang; may be repeated.", choices=("vllm", "sglang")),
    ] = ()
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Option("Least severe level that is logged.")] = (
        "info"
    )
    log_format: Annotated[LogFormat, Option("Format of log lines: text, or one JSON object each.")] = "text"
    otlp_endpoint: Annotated[
        str | None, Option("Receiver of OpenTelemetry spans of requests: http://HOST:4318/v1/traces.", metavar="URL")
    ] = None
    limits: Limits = Limits()

    # restarts and the journal
    restarts: Annotated[
        int,
        Option("Restarts of an engine within --restart-window-s; 0: none. The server ends with its last engine."),
    ] = 10
    restart_window_s: Annotated[float, Option("Seconds in which at most --restarts restarts are allowed.")] = 300.0
    durability: Annotated[
        Literal["none", "interval", "group", "every"], Option("When the journal is on disk: docs/journal.md.")
    ] = "none"
    journal_content: Annotated[
        Literal["full", "digests"], Option("Contents of the journal; one of digests cannot be continued.")
    ] = "full"
    journal_bytes: Annotated[int, Option("Bytes of the journal beyond which its oldest part expires.")] = 2**30
    journal_age_s: Annotated[float | None, Option("Age in seconds at which parts of the journal expire.")] = None
    snapshot_s: Annotated[float, Option("Seconds between two snapshots, from which an engine is recovered.")] = 30.0
    check_idle_s: Annotated[
        float, Option("Seconds between two checks of the scheduler's invariants while an engine is idle; 0: none.")
    ] = 60.0

    # time
    slow_reader_s: Annotated[
        float,
        Option("Seconds in which a client must read 16 KiB of an unsent answer, or the rest of it."),
    ] = 30.0
    stalled_s: Annotated[
        float, Option("Seconds without progress after which an engine with open requests is unhealthy.")
    ] = 120.0
    shutdown_s: Annotated[float, Option("Seconds that open answers have to end when the server stops.")] = 10.0

    def __post_init__(self) -> None:
        if self.emulate is not None and self.model is not None:
            raise ConfigError("`model` and `emulate` are two kinds of engine\nhint: give one of them")
        if self.emulate is not None and "@" not in self.emulate:
            raise ConfigError(f"`emulate` must be MODEL@GPU, got `{self.emulate}`\nhint: qwen3-8b@h200")
        least_values = (
            ("api_workers", 1),
            ("tp", 1),
            ("pp", 1),
            ("dp", 1),
            ("attention_dp", 1),
            ("port", 0),
            ("answer_tokens", 0),
            ("seed", 0),
        )
        more = (
            ("text_processes", 1),
            ("receive_interval", 1),
            ("max_lora_rank", 1),
            ("restarts", 0),
            ("journal_bytes", 2**20),
            ("grammar_compile_mb", 1),
            ("stored_responses", 0),
            ("kept_answers", 0),
            ("stored_files", 0),
        )
        for name, least in (*least_values, *more):
            if getattr(self, name) < least:
                raise ConfigError(f"`{name}` must be at least {least}, got `{getattr(self, name)}`")
        for name, most in AT_MOST.items():
            if (getattr(self, name) or 0) > most:
                raise ConfigError(f"`{name}` must be at most {most}, got `{getattr(self, name)}`")
        if self.random_weights is not None and self.random_weights < 0:
            raise ConfigError(f"`random_weights` must be a seed of at least 0, got `{self.random_weights}`")
        for name in (
            "model",
            "journal",
            "usage_dir",
            "admin_socket",
            "profile_dir",
            "tokenizer",
            "api_keys",
            "draft_model",
            "storage",
        ):
            if getattr(self, name) == "":
                raise ConfigError(f"`{name}` is empty\nhint: give a path, or drop it")
        for name, value in msgspec.structs.asdict(self).items():
            if isinstance(value, str) and "\0" in value:
                raise ConfigError(f"`{name}` has a zero character, got {value!r}\nhint: leave it out")
        for name, path in self.lora.items():
            if not name or not path or "\0" in name:
                raise ConfigError(f"`lora` needs NAME=PATH, got `{name}={path}`")
            if name in self.served_model_name:
                raise ConfigError(f"`lora` has {name}, which is also in `served_model_name`\nhint: another name")
        if self.lora and self.set.get("max_loras", 1) in (0, None):
            raise ConfigError("`lora` names adapters, but `max_loras` is 0, which turns LoRA off\nhint: drop it")
        for origin in self.cors_origins:
            if ORIGIN.fullmatch(origin) is None:
                raise ConfigError(
                    f"`cors_origins` must be origins such as https://chat.example or http://localhost:3000, got "
                    f"`{origin}`\nhint: scheme, host and port, without a path; `*` is not allowed"
                )
        for name in ("served_model_name", "allowed_hosts"):
            if "" in getattr(self, name):
                raise ConfigError(f"`{name}` has an empty name\nhint: give one, or drop it")
        defaults = {one.name: one.default for one in msgspec.structs.fields(self)}
        if self.max_lora_rank != defaults["max_lora_rank"] and not self.lora and not self.set.get("max_loras"):
            raise ConfigError(
                f"`max_lora_rank` is {self.max_lora_rank}, but LoRA is off\n"
                "hint: --lora NAME=PATH, or --set max_loras=N for adapters that are loaded later; or drop it"
            )
        for name in ROUTER_SETTINGS:
            if self.engines == 1 and getattr(self, name) != defaults[name]:
                raise ConfigError(f"`{name}` is for several engines\nhint: give dp, or drop it")
        self._check_roles()
        self.router_config()
        self._check_admission()
        if not 1e-6 <= self.speed <= 1e6:
            raise ConfigError(f"`speed` must be above 0, from 1e-6 to 1e6, got `{self.speed}`")
        for name in ("slow_reader_s", "stalled_s", "restart_window_s", "snapshot_s", "grammar_compile_s"):
            if not 0.0 < getattr(self, name) < 1e9:
                raise ConfigError(f"`{name}` must be above 0, got `{getattr(self, name)}`")
        if not 0.0 <= self.batch_timeout_s < 1e9:
            raise ConfigError(f"`batch_timeout_s` must be 0 (never) or more, got `{self.batch_timeout_s}`")
        if not 0.0 <= self.check_idle_s < 1e9:
            raise ConfigError(f"`check_idle_s` must be 0 (never) or more, got `{self.check_idle_s}`")
        if not 0.0 <= self.shutdown_s < 1e6:
            raise ConfigError(f"`shutdown_s` must be at least 0, got `{self.shutdown_s}`")
        if self.journal_age_s is not None and not 0.0 < self.journal_age_s < 1e9:
            raise ConfigError(f"`journal_age_s` must be above 0, got `{self.journal_age_s}`")
        if self.journal is None:
            for name, unset in (("durability", "none"), ("journal_content", "full"), ("journal_age_s", None)):
                if getattr(self, name) != unset:
                    raise ConfigError(f"`{name}` needs a stored journal\nhint: give journal, or drop it")
        for name in self.metrics_compat:
            if name not in ("vllm", "sglang"):
                raise ConfigError(f"`metrics_compat` must be vllm or sglang, got `{name}`")
        check_tiers(self, RankOptions())
        self._check_layouts()
        known = [one.name for one in msgspec.structs.fields(SchedConfig)]
        for name, value in self.set.items():
            refuse_in_runtime(name)
            if name not in known:
                hint = _near(name, known) or "\nhint: `lockstep serve --dry-run` prints them all"
                raise ConfigError(f"there is no setting `{name}` of the scheduler{hint}")
            _check_kind(name, value)
        method = self.set.get("speculative_method", "none")
        if method != "none" and self.emulate is not None:
            raise ConfigError(
                f"`speculative_method` is {method}, but an emulated engine verifies no drafts\n"
                "hint: leave it out; `lockstep simulate` predicts its effect"
            )
        if self.set.get("jump_forward_tokens") and self.emulate is not None:
            raise ConfigError(
                f"`jump_forward_tokens` is {self.set['jump_forward_tokens']}, but an emulated engine draws each token "
                "by itself\nhint: leave it out; `lockstep simulate` predicts its effect"
            )
        if self.set.get("expert_load_interval") and self.emulate is not None:
            raise ConfigError(
                f"`expert_load_interval` is {self.set['expert_load_interval']}, but an emulated engine has no experts\n"
                "hint: leave it out"
            )
        for name in ("encoder_cache_tokens", "encoder_budget_tokens"):
            if name in self.set and self.emulate is not None:
                raise ConfigError(
                    f"`{name}` is {self.set[name]}, but an emulated engine takes no media\n"
                    "hint: leave it out; `lockstep simulate --media` predicts its effect"
                )
        for name, formats in (("tool_call_parser", TOOL_FORMATS), ("reasoning_parser", THOUGHTS)):
            if getattr(self, name) not in ("auto", "none", *formats):
                known_formats = ", ".join(("auto", "none", *formats))
                raise ConfigError(f"`{name}` must be one of {known_formats}, got `{getattr(self, name)}`")
        if self.emulate is None:
            for name in ("engine", "profile", "speed", "answers", "answer_tokens"):
                if getattr(self, name) != defaults[name]:
                    raise ConfigError(f"`{name}` is for an emulated engine\nhint: drop it, or give emulate")
        else:
            for name in (*OF_A_MODEL, "prefill_pp", "decode_pp", "prefill_attention_dp", "decode_attention_dp"):
                if getattr(self, name) != defaults[name]:
                    raise ConfigError(f"`{name}` is for a model, and an emulated engine has none\nhint: drop it")
            if self.profile_dir is not None:
                raise ConfigError("`profile_dir`: an emulated engine has no device to profile\nhint: drop it")
        if self.admin_socket is not None and self.api_keys is None:
            raise ConfigError("`admin_socket` needs `api_keys`\nhint: give api_keys, with a key that has admin = true")
        if not is_loopback(self.host) and self.api_keys is None:
            raise ConfigError(
                f"`host` {self.host} can be reached from other machines, and there are no keys\n"
                "hint: give api_keys, or serve 127.0.0.1 behind a proxy that authenticates clients"
            )

    @property
    def hands_over(self) -> bool:
        """Whether prompts are computed by other engines than those that continue behind them."""
        return self.prefill_engines > 0

    @property
    def engines(self) -> int:
        """Number of engine processes. Prefill engines have the first numbers, then come decode engines.

        Each data-parallel rank has one; those of one engine have consecutive numbers.
        """
        if not self.hands_over:
            return self.dp * self.attention_dp
        return self.prefill_processes + self.decode_engines * self._of_role("decode", "attention_dp")

    @property
    def prefill_processes(self) -> int:
        """Number of processes of all prefill engines."""
        return self.prefill_engines * self._of_role("prefill", "attention_dp")

    def role_of(self, engine: int) -> str:
        """Return the role of an engine: mixed, prefill or decode."""
        if not self.hands_over:
            return "mixed"
        return "prefill" if engine < self.prefill_processes else "decode"

    def _of_role(self, role: str, name: str) -> int:
        """Return `tp`, `pp` or `attention_dp` of the engines of a role."""
        own = getattr(self, f"{role}_{name}", None)  # mixed engines have no option of their own
        found: int = getattr(self, name) if own is None else own
        return found

    def tp_of(self, engine: int) -> int:
        """Return the GPUs of each pipeline stage of an engine."""
        return self._of_role(self.role_of(engine), "tp")

    def pp_of(self, engine: int) -> int:
        """Return the pipeline stages of an engine."""
        return self._of_role(self.role_of(engine), "pp")

    def attention_dp_of(self, engine: int) -> int:
        """Return the data-parallel ranks of the engine to which a process belongs."""
        return self._of_role(self.role_of(engine), "attention_dp")

    def rank_of(self, engine: int) -> int:
        """Return which data-parallel rank of its engine a process is."""
        first = self.prefill_processes if self.role_of(engine) == "decode" else 0
        return (engine - first) % self.attention_dp_of(engine)

    @property
    def has_ranks(self) -> bool:
        """Whether any engine has data-parallel ranks."""
        return max(self.attention_dp_of(engine) for engine in range(self.engines)) > 1

    def layout_of(self, engine: int) -> dict[str, Any]:
        """Return the options by which the model of an engine is split."""
        ranks = self.attention_dp_of(engine)
        schedulers = self.rank_schedulers and (ranks > 1 or not self.has_ranks)  # of the engines with ranks
        split = {"tp": self.tp_of(engine), "pp": self.pp_of(engine)}
        return {**split, "attention_dp": ranks, "rank_schedulers": schedulers}

    def gpus_of(self, engine: int) -> int:
        """Return the GPUs of an engine, of all its stages; of a data-parallel rank, its own."""
        return self.tp_of(engine) * self.pp_of(engine) // self.attention_dp_of(engine)

    def _check_roles(self) -> None:
        """Raise ConfigError for options of prefill and decode engines that contradict others."""
        prefills, decodes = self.prefill_engines, self.decode_engines
        for name in ("prefill_engines", "decode_engines"):
            if not 0 <= getattr(self, name) <= AT_MOST["dp"]:
                raise ConfigError(f"`{name}` must be 0 to {AT_MOST['dp']}, got `{getattr(self, name)}`")
        if bool(prefills) != bool(decodes):
            raise ConfigError(
                f"`prefill_engines` is {prefills} and `decode_engines` is {decodes}: requests need one of each\n"
                "hint: give both, or none"
            )
        if (role := self.set.get("role", "mixed")) != "mixed":
            raise ConfigError(
                f"`role` is {role}, but the roles of a server's engines follow from their numbers\n"
                "hint: --prefill-engines 1 --decode-engines 1"
            )
        for role, name in product(("prefill", "decode"), ("tp", "pp", "attention_dp")):
            value, most = getattr(self, f"{role}_{name}"), AT_MOST[name]
            if value is not None and not (self.hands_over and 1 <= value <= most):
                raise ConfigError(
                    f"`{role}_{name}` is {value}; it must be at least 1, and is for prefill and decode engines\n"
                    "hint: --prefill-engines 1 --decode-engines 1"
                )
        if self.has_ranks:
            for name, unset in (("dp", 1), ("admission", None), ("calibration", None)):
                if (given := getattr(self, name)) != unset:
                    most = max(self.attention_dp_of(engine) for engine in range(self.engines))
                    raise ConfigError(
                        f"`{name}` is {given}, but `attention_dp` is {most}: a server has one engine of "
                        "data-parallel ranks, or some for each role, without that\nhint: drop one of the two"
                    )
        if not self.hands_over:
            for name in ("transfer_transport", "transfer_checksums"):
                if getattr(self, name) != getattr(RankOptions(), name):
                    raise ConfigError(
                        f"`{name}` is for prefill and decode engines\nhint: --prefill-engines 1 --decode-engines 1"
                    )
            return
        if self.dp != 1:
            raise ConfigError(f"`dp` is {self.dp}, and there are prefill and decode engines\nhint: give one of the two")
        if self.admission is not None:
            raise ConfigError(
                "`admission` is given, but a queue in front of prefill and decode engines does not exist yet\n"
                "hint: leave it out"
            )

    def _check_layouts(self) -> None:
        """Raise ConfigError for options that do not go together in an engine, of any role."""
        tps = sorted({self.tp_of(engine) for engine in range(self.engines)})
        layouts = {tuple(self.layout_of(engine).items()): None for engine in range(self.engines)}
        for layout in layouts:
            of_engine = copy(self)  # without another `__post_init__`
            for name, value in layout:
                msgspec.structs.force_setattr(of_engine, name, value)
            check_layout(of_engine, self.set, tps)

    def router_config(self) -> RouterConfig:
        """Return the policy by which requests are assigned to engines. Raises ConfigError."""
        try:
            return RouterConfig(
                policy=self.router, **{name: getattr(self, f"router_{name}") for name in policy_settings()}
            )
        except ConfigError as error:  # its message has names of RouterConfig
            raise ConfigError(re.sub(r"^`(?!router)", "`router_", str(error))) from error

    def _check_admission(self) -> None:
        admission = self.admission_config()
        if admission is None:
            return
        if admission.tenant_weights and self.api_keys is None:
            raise ConfigError("`admission` has shares, but without api_keys there are no tenants\nhint: give api_keys")
        if admission.order == "priority" and self.set.get("schedule_low_priority_values_first"):
            raise ConfigError(
                "`admission` has order=priority, the highest first, but `schedule_low_priority_values_first` is true\n"
                "hint: drop one of them"
            )

    def admission_config(self) -> DispatchConfig | None:
        """Return the settings of the router's waiting queue; None: requests do not wait there. Raises ConfigError."""
        return None if self.admission is None else parse_admission(self.admission)

    def of_engine(self, engine: int) -> ServeSettings:
        """Return the settings of one engine of several: journal and profiles are in a folder of its own."""
        changed: dict[str, Any] = {
            name: str(Path(folder) / "engines" / str(engine))
            for name in ("journal", "profile_dir")
            if (folder := getattr(self, name)) is not None
        }
        return msgspec.structs.replace(self, **changed)

    def answers_folder(self, folder: Path) -> Path:
        """Return the folder of stored and kept answers: beside the journal, or in the folder of the sockets."""
        return folder if self.journal is None else Path(self.journal) / ANSWERS

    @property
    def tenants_apart(self) -> bool:
        """Whether tenants share no prefixes: `isolate_tenants` if it is set, else whether there are keys."""
        return bool(self.set.get("isolate_tenants", self.api_keys is not None))


def _check_kind(name: str, value: Any) -> None:
    """Check that a value is a boolean, or a list, if the scheduler requires one. Raises ConfigError."""
    kind = setting_fields(SchedConfig)[name].type
    if kind is bool and not isinstance(value, bool):
        raise ConfigError(f"`{name}` must be true or false, got `{value}`")
    if get_origin(kind) is tuple:
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            raise ConfigError(f"`{name}`: {error}") from error


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine only."""
    if host in LOOPBACK:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_settings(file: Path | None, given: dict[str, Any]) -> ServeSettings:
    """Return the settings of a TOML file, overridden by those of the command line.

    Raises: ConfigError, with the field, its value and the values allowed.
    """
    known = [one.name for one in msgspec.structs.fields(ServeSettings)]
    found, lines = _read_file(file, known) if file is not None else ({}, {})
    scheduler = {**found.get("set", {}), **given.get("set", {})} if isinstance(found.get("set", {}), dict) else None
    merged = {**found, **given} | ({"set": scheduler} if scheduler is not None else {})

    def placed(text: str) -> str:
        """Return an error with the line of the file that has the field, if a file has it."""
        named = next((name for name in re.findall(r"`\$?\.?(\w+)", text) if name in lines and name not in given), None)
        where = "" if file is None else f"{file}: " if named is None else f"{file}, line {lines[named]}: "
        return f"{where}{text}"

    try:
        return msgspec.convert(merged, ServeSettings)
    except ConfigError as error:
        raise ConfigError(placed(str(error))) from None
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):  # raised by __post_init__
            raise ConfigError(placed(str(error.__cause__))) from None
        raise ConfigError(placed(str(error))) from error


def _read_file(file: Path, known: list[str]) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the settings of a TOML file, and the line of each. Names may be flags without their dashes.

    Raises: ConfigError for a file that cannot be read, and for a name that is not in `known`, with its line.
    """
    try:
        text = file.read_text("utf-8")
        table = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"`config`: {file} cannot be read: {error}") from error
    flags = {field.flag.removeprefix("--").replace("-", "_"): name for name, field in options_of(ServeSettings).items()}
    found: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for key, value in table.items():
        spelt = key.replace("-", "_")
        name = spelt if spelt in known else flags.get(spelt, spelt)
        pattern = re.compile(rf"\s*\[?\"?{re.escape(key)}\"?\s*[\].=]")
        lines[name] = next((number for number, line in enumerate(text.split("\n"), 1) if pattern.match(line)), 1)
        if name not in known:
            raise ConfigError(f"{file}, line {lines[name]}: there is no setting `{key}`{_near(name, known)}")
        if name in found:
            raise ConfigError(f"{file}, line {lines[name]}: `{key}` is given twice\nhint: leave one of them out")
        found[name] = value
    return found, lines


def settings_toml(settings: ServeSettings) -> str:
    """Return the settings that are not their defaults as the text of a TOML file, which `read_settings` reads back."""
    usual, values = (msgspec.to_builtins(one) for one in (ServeSettings(), settings))
    changed = {name: value for name, value in values.items() if value is not None and value != usual[name]}
    plain = {name: value for name, value in changed.items() if not isinstance(value, dict)}
    lines = ["# lockstep serve", *(f"{name} = {_toml(value)}" for name, value in plain.items())]
    for name, table in changed.items():
        if isinstance(table, dict):
            lines += ["", f"[{name}]", *(f"{_toml_key(key)} = {_toml(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_key(key)} = {_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)


def sched_values(settings: tuple[str, ...]) -> dict[str, Any]:
    """Parse texts NAME=VALUE. A value that is no JSON (number, list, true, false, null) is text. Raises ConfigError."""
    found: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise ConfigError(f"`set` needs NAME=VALUE, got `{setting}`")
        try:
            found[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            found[name] = value
    return found


def for_scheduler(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with tuples for lists, as SchedConfig requires; JSON and TOML have lists only."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}


def _near(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, n=2)
    return f"\nhint: did you mean {' or '.join(near)}?" if near else ""
