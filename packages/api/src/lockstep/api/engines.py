"""Assembly of an engine: a model with its executor, or a cost model with a clock.

Engines are built in the engine process, and by `lockstep serve --dry-run`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from lockstep.api.processes import rpc
from lockstep.api.processes.sockets import engine_folder
from lockstep.api.processes.wire import NO_MEDIA, BatchDrift, EngineInfo, JoinGroup, LeaveGroup
from lockstep.api.settings import ServeSettings, for_scheduler
from lockstep.api.text.chat_formats.tables import ChatFormats, choose
from lockstep.api.text.plain_text import END, FIRST_WORD, PlainText, Texts
from lockstep.core.contract.commands import Step
from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ConfigError, LockstepError
from lockstep.core.contract.events import ObservedEvent, RequestArrived
from lockstep.core.journal.records import JournalHeader
from lockstep.core.journal.sinks import NoJournal
from lockstep.core.requests.table import prompt_bytes
from lockstep.core.scheduler.engine import Engine
from lockstep.host.adapters import LORAS, AdapterRegistry, source_of
from lockstep.host.durable import DurableJournal, Retention
from lockstep.host.engine_options import EngineOptions
from lockstep.host.grammar_backends import choose_backend
from lockstep.host.grammar_compiler import CompileLimits, GrammarCompiler, make_compilers
from lockstep.host.handover.decode import DecodeSide
from lockstep.host.handover.kv import KvTransport
from lockstep.host.handover.prefill import PrefillSide
from lockstep.host.host_header import EMULATED, HostHeader
from lockstep.host.idle_check import IdleCheck
from lockstep.host.loop import HostClock, RuntimeHost
from lockstep.host.media.processor import has_processor, lacking_packages
from lockstep.host.media.source import MediaLimits
from lockstep.host.options import options_of
from lockstep.host.recovery import Death
from lockstep.host.services import DeviceServices, EarlierGeneration, Observer, RequestServices
from lockstep.host.startup import Keeper
from lockstep.host.stop_regexes import Watch, watch_of
from lockstep.host.text import Text
from lockstep.host.weights import WeightsLog, WeightsRead

if TYPE_CHECKING:
    from lockstep.api.observability.drift import DriftMeter
    from lockstep.runtime.data_ranks import DataRank

log = logging.getLogger("lockstep.engine")


@dataclass(frozen=True, kw_only=True)
class EngineUnit:
    """An engine that is ready to run.

    Args:
        memory: table of the device memory that each part takes, for display.
        weights: storage format of the weights and their arithmetic, for display; empty if they are not quantised.
        drift: returns measured over predicted batch times so far; empty without a calibration.
        grammars: compiles grammars; None: requests have none.
        start: starts the host's thread. If the thread ends by itself, `host.failure` contains the reason.
        close: ends the engine and its thread.
        group: joins or leaves a trainer's group; may be called from any thread. Raises ConfigError.
        read_weights: reads the first rows of a tensor; may be called from any thread. Raises ConfigError.
        trace: begins (with options) or ends (None) a profile of the device, and returns a message. It blocks until the
            engine has done so. Raises ConfigError.
    """

    host: RuntimeHost
    info: EngineInfo
    memory: str
    start: Callable[[], object]
    close: Callable[[], None]
    drift: Callable[[], tuple[BatchDrift, ...]] = tuple
    trace: Callable[[dict[str, Any] | None], str] | None = None
    read_weights: Callable[[str, int], WeightsRead] | None = None
    group: Callable[[JoinGroup | LeaveGroup], None] | None = None
    keeper: Keeper | None = None
    weights: str = ""
    adapters: AdapterRegistry | None = None
    grammars: GrammarCompiler | None = None
    handover: PrefillSide | DecodeSide | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """The place of an engine process in its server.

    Args:
        folder: folder of the engine's sockets. It also holds the journal for recovery, unless the settings name a
            folder for it.
        death: how the previous engine generation of this server ended; None: this is the first.
        number: number of the engine among several.
    """

    folder: Path
    death: Death | None = None
    number: int = 0


def preload(settings: ServeSettings) -> None:
    """Import what an engine of these settings needs, and read what does not change. Opens no device."""
    with suppress(LockstepError, ImportError):  # the engine that needs it reports a missing package
        if settings.emulate is None:
            import lockstep.runtime.llm  # and with it torch, which takes seconds
        else:
            check_names(settings)
            import lockstep.api.emulate
            import lockstep.api.observability.drift
            import lockstep.sim.run.simulate
        if choose_backend(settings.grammar_backend) == "llguidance":
            import lockstep.host.llguidance_backend  # noqa: F401


def _keeper(settings: ServeSettings, place: Place | None) -> Keeper | None:
    """Return the keeper of the engine's journal. None: there is no journal, or the engine is built for a dry run."""
    if place is None or (settings.journal is None and not settings.restarts):
        return None
    run = place.folder if settings.journal is None else Path(settings.journal)
    bytes_max = settings.journal_bytes if settings.journal is not None else 0  # 0: only what recovery needs
    return Keeper(
        run,
        content=settings.journal_content,
        durability=settings.durability,
        retention=Retention(snapshot_s=settings.snapshot_s, bytes_max=bytes_max, age_s=settings.journal_age_s),
        death=place.death,
    )


def build_engine(settings: ServeSettings, place: Place | None = None) -> EngineUnit:
    """Build the engine of these settings. Without a place it has no journal. Raises ConfigError, JournalError."""
    keeper = _keeper(settings, place)
    if settings.emulate is None:
        unit = _model(settings, keeper, place)
    else:
        with _config_errors():
            unit = _emulated(settings, keeper, place)
    if settings.check_idle_s:
        unit.host.idle_check = IdleCheck(unit.host.engine, settings.check_idle_s)
    return unit


def check_names(settings: ServeSettings) -> None:
    """Check that models, adapters and calibrations named in the settings exist. Starts nothing. Raises ConfigError."""
    rpc.check_installed(settings.rpc_functions)
    if settings.calibration is not None:
        with _config_errors("calibration"):
            from lockstep.sim.catalogue import load_calibration

            load_calibration(settings.calibration)
    if settings.emulate is not None:
        with _config_errors("engine"):
            from lockstep.sim.catalogue import load_engine
            from lockstep.sim.cost.engines import NONE

            if settings.engine not in (None, NONE):
                load_engine(settings.engine)
        with _config_errors():
            from lockstep.sim.catalogue import load_gpu, load_model

            named, _, on = settings.emulate.rpartition("@")
            model = load_model(named)
            load_gpu(on)
        if model.whole is not None:
            raise ConfigError(
                f"`emulate` is {settings.emulate}, but an emulated engine has neither vectors nor labels, and "
                f"{model.name} gives nothing else\nhint: --model FOLDER with its weights, or `lockstep simulate`"
            )
    else:
        for adapter, folder in settings.lora.items():
            try:
                source_of(folder)
            except ConfigError as error:
                raise ConfigError(f"`lora` {adapter}: {error}") from error
        if settings.draft_model is not None:
            _found("draft_model", settings.draft_model)
    text_of(settings)


HINTS = {
    ", or a smaller --weights-dtype": ", or weights in fewer bits: a folder whose config.json has quantization_config",
    " and choose --weights-dtype": "",
    ", or --weights-dtype fp8 on an H100": ", or a folder whose config.json has quantization_config fp8, on an H100",
    "lower --max-loras or": "lower --set max_loras=N or",
    "leave out --adapters": "leave out --lora and --set max_loras=N",
    "--lora-targets all, or ": "",
}
"""Options in hints of the simulator that `lockstep serve` lacks -> the equivalent text for `lockstep serve`."""


@contextmanager
def _config_errors(setting: str = "emulate") -> Iterator[None]:
    """Raise errors of the simulator (calibration, capacity, catalogue) as ConfigError of this setting."""
    try:
        from lockstep.sim.cost import CalibrationError, CapacityError, CatalogueError
    except ImportError as error:
        raise ConfigError(f"`{setting}` needs the package lockstep-sim: {error}\nhint: install it") from error
    try:
        yield
    except (CalibrationError, CapacityError, CatalogueError) as error:
        message = str(error)
        for theirs, ours in HINTS.items():
            message = message.replace(theirs, ours)
        named = message if message.startswith(f"`{setting}`") else f"`{setting}`: {message}"
        raise ConfigError(named) from error


def text_of(settings: ServeSettings) -> Texts | None:
    """Return the tokenizer of these settings; None for a model without one. Raises ConfigError.

    Special tokens that mark tool calls or thoughts are decoded as text, in the engine and in the workers alike.
    """
    if settings.tokenizer is None and settings.emulate is not None:
        return PlainText()
    folder = model_folder(settings) if settings.tokenizer is None else Path(settings.tokenizer)
    if settings.tokenizer is None and not (folder / "tokenizer.json").is_file():
        return None
    text = Text(folder)
    text.keep(formats_of(settings, text).texts())
    return text


def _no_media(folder: Path, text: Texts | None) -> str:
    """Return why the server cannot read media for a model that takes them; empty if it can."""
    if text is None:
        return "it needs a tokenizer.json in the model's folder, and there is none"
    if not has_processor(folder):
        return "the model's folder has no settings of a processor (preprocessor_config.json)"
    return ""


def media_limits(settings: ServeSettings) -> MediaLimits:
    """Return the limits of media."""
    limits = settings.limits
    return MediaLimits(
        images=limits.images_max,
        image_bytes=limits.image_bytes_max,
        image_pixels=limits.image_pixels_max,
        audios=limits.audios_max,
        audio_bytes=limits.audio_bytes_max,
        audio_seconds=limits.audio_seconds_max,
        videos=limits.videos_max,
        video_bytes=limits.video_bytes_max,
        video_seconds=limits.video_seconds_max,
        video_frames=limits.video_frames_max,
        video_pixels=limits.video_pixels_max,
        fetch_s=limits.media_fetch_s,
        folder=settings.allowed_local_media_path,
        hosts=settings.allowed_media_domains,
    )


def formats_of(settings: ServeSettings, text: Texts | None) -> ChatFormats:
    """Return the formats in which the model writes tool calls and thoughts."""
    template = None if text is None else text.chat_template
    return choose(settings.tool_call_parser, settings.reasoning_parser, template)


def model_folder(settings: ServeSettings) -> Path:
    """Return the folder of the model or of the demo model. Raises ConfigError if it or the runtime is missing.

    A GGUF file or a published model is in the user's cache afterwards.
    """
    return _found("model", settings.model)


def _found(setting: str, given: str | None) -> Path:
    """Return the Hugging Face folder of a model, or of the demo model. Raises ConfigError."""
    try:
        from lockstep.runtime.demo_model import demo_model_folder
        from lockstep.runtime.sources import find_model
    except ImportError as error:
        raise ConfigError(
            f"a model needs the package lockstep-runtime: {error}\n"
            "hint: install it, or give emulate (--emulate qwen3-8b@h200), which needs neither model nor torch"
        ) from error
    return demo_model_folder() if given is None else find_model(given, setting=setting)


def _scheduler(settings: ServeSettings, number: int = 0) -> dict[str, Any]:
    """Return the settings of the scheduler of an engine.

    With keys, `isolate_tenants` is on unless the settings turn it off. A prompt whose KV does not arrive is computed by
    the decode engine, unless `transfer_failure` is set.
    """
    shared: dict[str, Any] = {} if settings.api_keys is None else {"isolate_tenants": True}
    if settings.hands_over:
        shared |= {"role": settings.role_of(number), "transfer_failure": "recompute"}
    return shared | for_scheduler(settings.set)


def _info(config: SchedConfig, **more: Any) -> EngineInfo:
    return EngineInfo(
        request_tokens_max=config.request_tokens_max,
        prompt_tokens_max=config.prompt_tokens_max(with_output=more.get("generates", True)),
        eos_token_ids=config.eos_token_ids,
        settings=msgspec.to_builtins(config),
        **more,
    )


# ------------------------------------------------------------------------------------------------------------- a model


def _side(settings: ServeSettings, place: Place, kv: KvTransport) -> PrefillSide | DecodeSide:
    """Return the side of a prefill or decode engine, which finds the others by their numbers."""

    def address(number: int) -> str:
        return f"unix:{engine_folder(place.folder.parent, number, settings.engines) / 'kv'}"

    if settings.role_of(place.number) == "prefill":
        return PrefillSide(kv, address(place.number), number=place.number)
    return DecodeSide(kv, address, number=place.number)


def _data_rank(settings: ServeSettings, place: Place) -> DataRank | None:
    """Return which data-parallel rank an engine process is; None: its engine has one."""
    from lockstep.runtime.data_ranks import DataRank

    if (ranks := settings.attention_dp_of(place.number)) == 1:
        return None
    rank = settings.rank_of(place.number)
    return DataRank(rank, ranks, engine_folder(place.folder.parent, place.number - rank, settings.engines))


def _model(settings: ServeSettings, keeper: Keeper | None, place: Place | None) -> EngineUnit:
    number = 0 if place is None else place.number
    folder = model_folder(settings)
    try:
        from lockstep.runtime import LLM
        from lockstep.runtime.assembly import weights_of
        from lockstep.runtime.engine_config import EngineConfig
    except ImportError as error:
        raise ConfigError(
            f"a model needs the package lockstep-runtime with torch: {error}\n"
            "hint: install it, or give emulate (--emulate qwen3-8b@h200)"
        ) from error
    split = settings.layout_of(number) | {"device": _device(settings, number)}
    scheduler = _scheduler(settings, number)
    loras = scheduler.get("max_loras", LORAS if settings.lora else None)
    meter = None
    if settings.calibration is not None:
        of_engine = msgspec.structs.replace(settings, device=split["device"], tp=split["tp"])
        meter = _meter(of_engine, settings.calibration, folder, loras)
    text = text_of(settings)
    assert text is None or isinstance(text, Text)  # only an emulated model has another kind
    config = EngineConfig(
        **{name: getattr(settings, name) for name in options_of(EngineOptions)} | split,
        text=text,
        lora=settings.lora,
        grammar_limits=_grammar_limits(settings),
        keeper=keeper,
        start=False,
        sched=scheduler,
        hand_over=None if place is None or not settings.hands_over else partial(_side, settings, place),
        data_rank=None if place is None else _data_rank(settings, place),
    )
    llm = LLM(folder, config)
    why = llm.no_media or _no_media(folder, text)
    kinds = {kind: lacking_packages(kind) for kind in llm.model.settings.media}
    demo = settings.model is None
    info = _info(
        llm.config,
        model="demo" if demo else folder.resolve().name,
        kind="model",
        vocabulary=llm.model.settings.vocab,
        logprobs=llm.model.settings.generates,
        device=f"{gpus} x {llm.model.device}" if (gpus := settings.gpus_of(number)) > 1 else str(llm.model.device),
        generates=llm.model.settings.generates,
        vector_size=llm.model.settings.hidden,
        matryoshka=_matryoshka(folder),
        logit_processors=settings.logit_processors,
        able=_abilities(settings, llm.config),
        grammars="" if llm.grammars is None else llm.grammars.backend,
        no_grammars=llm.no_grammars,
        media=() if why else tuple(kind for kind, lacking in kinds.items() if not lacking),
        no_media=why or NO_MEDIA,
        no_kinds={} if why else {kind: lacking for kind, lacking in kinds.items() if lacking},
        labels=llm.model.settings.labels,
        activation=llm.model.settings.activation,
        token_types=llm.model.settings.token_types,
        embedding_size=0 if llm.no_embeddings else llm.model.embedding_size,
        no_embeddings=llm.no_embeddings,
    )

    def trace(options: dict[str, Any] | None) -> str:
        """Begin or (options None) end a profile. Returns a message. Raises ConfigError."""
        if options is not None:
            llm.start_profile(str(settings.profile_dir), **options)
            return f"traces go to {settings.profile_dir}"
        return "written: " + (
            ", ".join(path.name for path in llm.stop_profile()) or "nothing, because no batch was launched"
        )

    def group(message: JoinGroup | LeaveGroup) -> None:
        """Join or leave a trainer's group. Raises ConfigError."""
        if isinstance(message, JoinGroup):
            place = (message.name, message.address, message.port, message.rank, message.ranks)
            llm.join_group(*place, message.backend)
        else:
            llm.leave_group(message.name)

    unit = EngineUnit(
        host=llm.host,
        info=info,
        memory=llm.memory.table(),
        weights=weights_of(llm.model),
        start=llm.start,
        close=llm.close,
        keeper=keeper,
        trace=trace,
        read_weights=llm.weights,
        group=group,
        adapters=llm.adapter_registry,
        grammars=None if llm.grammars is None else llm.grammars.compiler,
        handover=llm.handover,
    )
    if meter is None:
        return unit
    llm.host.observe = both(llm.host.observe, meter.fold)
    return replace(unit, drift=meter.read)


def _abilities(settings: ServeSettings, config: SchedConfig) -> tuple[str, ...]:
    """Return the device functions that an operator may use: EngineInfo.able."""
    able = {"profile": settings.profile_dir is not None, "experts": config.expert_load_interval is not msgspec.UNSET}
    return tuple(name for name, there in able.items() if there)


def _device(settings: ServeSettings, number: int) -> str:
    """Return the device of an engine. Of several, each has its own GPUs, or its share of the CPU's threads.

    Raises: ConfigError if there are fewer GPUs than all of them need.
    """
    if settings.engines == 1:
        return settings.device
    import torch

    from lockstep.runtime.assembly import choose_device

    first = choose_device(settings.device)
    if first.type == "cpu":
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, torch.get_num_threads() // settings.engines))
        return "cpu"
    sizes = [settings.gpus_of(engine) for engine in range(settings.engines)]
    index, needed, count = first.index or 0, sum(sizes), torch.cuda.device_count()
    if index + needed > count:
        raise ConfigError(
            f"{settings.engines} engines of {', '.join(map(str, sizes))} GPUs (`tp` x `pp`) need {needed} from "
            f"cuda:{index} on, but torch sees {count}\nhint: fewer engines, a smaller tp or pp, or CUDA_VISIBLE_DEVICES"
        )
    return f"cuda:{index + sum(sizes[:number])}"


def check_journal(settings: ServeSettings) -> None:
    """Refuse a run folder that was written with another number of engines. Raises ConfigError."""
    if settings.journal is None:
        return
    run = Path(settings.journal)
    several, alone = len(list(run.glob("engines/*/journal"))), any((run / "journal").glob("*.log"))
    engines = several or int(alone)
    if several if settings.engines == 1 else alone or several not in (0, settings.engines):
        alike = not settings.hands_over and not settings.has_ranks
        wanted = f"`dp` is {settings.dp}" if alike else f"there are {settings.engines}"
        hint = f"give dp {engines}, or another folder" if alike else "another folder"
        raise ConfigError(
            f"`journal`: {run} holds a run of {engines} engine{'s' * (engines > 1)}, and {wanted}\nhint: {hint}"
        )


def _grammar_limits(settings: ServeSettings) -> CompileLimits:
    return CompileLimits(cpu_s=settings.grammar_compile_s, memory_bytes=settings.grammar_compile_mb * 2**20)


def both(first: Observer | None, second: Observer) -> Observer:
    """Return an observer that calls both observers in this order."""
    if first is None:
        return second

    def observe(event: ObservedEvent, step: Step) -> None:
        first(event, step)
        second(event, step)

    return observe


def _meter(settings: ServeSettings, named: str, folder: Path, loras: int | None) -> DriftMeter:
    """Return the meter of batch times against a calibrated cost model with `loras` adapter slots.

    Raises: ConfigError if the calibration was made on another device than this one.
    """
    from lockstep.runtime.assembly import choose_device, device_name
    from lockstep.runtime.llm import model_name

    where = device_name(choose_device(settings.device))
    with _config_errors("calibration"):
        from lockstep.api.observability.drift import DriftMeter
        from lockstep.sim.catalogue import load_calibration, load_gpu, load_model
        from lockstep.sim.cost.base_model import base_cost_model
        from lockstep.sim.cost.calibration import Case
        from lockstep.sim.cost.lora import LoraSpec
        from lockstep.sim.host.batch_shapes import RowAdapters

        calibration, gpu, name = load_calibration(named), load_gpu(where), model_name(folder)
        if calibration.gpu != gpu.name:
            raise ConfigError(
                f"`calibration` {named} was made on {calibration.gpu}, and this engine runs on {gpu.name}\n"
                "hint: lockstep calibrate --from RUN makes one from a journal of this server"
            )
        model = load_model(name if name == "demo" else str(folder))
        kinds: dict[str, Any] = {"kv_dtype": _kv_dtype(settings), "fp8_activations": settings.fp8_activations}
        lora = LoraSpec(loras, settings.max_lora_rank) if loras else None
        cost = calibration.cost_model(base_cost_model(model, gpu, settings.tp, lora=lora, **kinds))
    log.info("batches are predicted by the calibration %s", calibration.title)
    for doubt in calibration.doubts(Case(model.name, gpu.name), overlap_depth=1, has_intervals=False):
        log.warning("%s", doubt)
    return DriftMeter(cost, adapters=None if lora is None else RowAdapters())


def _kv_dtype(settings: ServeSettings) -> Literal["bf16", "fp8"]:
    """Return the KV data type under its name in the cost models."""
    return "fp8" if settings.kv_cache_dtype == "fp8_e4m3" else "bf16"


def _matryoshka(folder: Path) -> tuple[int, ...] | None:
    """Return the shorter embedding sizes that config.json lists for a model; () for any size, None for no other."""
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"`model`: {folder / 'config.json'} cannot be read: {error}") from error
    sizes = config.get("matryoshka_dimensions") if isinstance(config, dict) else None
    if isinstance(sizes, list) and all(isinstance(one, int) for one in sizes):
        return tuple(sizes)
    return () if isinstance(config, dict) and config.get("is_matryoshka") is True else None


# ------------------------------------------------------------------------------------------------------ an emulated one


def _emulated(settings: ServeSettings, keeper: Keeper | None, place: Place | None) -> EngineUnit:
    from lockstep.api.emulate import (
        EmulatedAdapterCache,
        EmulatedExecutor,
        EmulatedTimes,
        EmulatedWeightLoader,
        Script,
        emulated_source,
    )
    from lockstep.api.emulated_transfers import EmulatedTransport
    from lockstep.api.observability.drift import DriftMeter
    from lockstep.sim.catalogue import load_gpu, load_model
    from lockstep.sim.cost.base_model import base_cost_model
    from lockstep.sim.cost.hardware import NETWORK_GBS
    from lockstep.sim.cost.lora import slot_bytes
    from lockstep.sim.host.adapters import adapter_link
    from lockstep.sim.host.batch_shapes import RowAdapters
    from lockstep.sim.host.hybrid_memory import TransferBytes
    from lockstep.sim.run.adapters import lora_of
    from lockstep.sim.run.assemble import configure
    from lockstep.sim.run.engine import calibration_of
    from lockstep.sim.scenario.scenario import Scenario
    from lockstep.sim.workload.adapters import RECORDED

    assert settings.emulate is not None
    named, _, on = settings.emulate.rpartition("@")
    model, gpu = load_model(named), load_gpu(on)
    text = text_of(settings)
    assert text is not None
    vocabulary = _vocabulary(text, model.vocab, settings)
    number = 0 if place is None else place.number
    settings = msgspec.structs.replace(settings, tp=settings.tp_of(number))
    scheduler = _scheduler(settings, number)
    if settings.lora:
        scheduler.setdefault("max_loras", LORAS)
    script = None if settings.answers is None else Script.read(Path(settings.answers), text)
    if settings.answer_tokens or script is not None:
        scheduler.setdefault("eos_token_ids", (vocabulary.end,))
    scenario = Scenario(
        model=named,
        gpu=on,
        workload="",
        tp=settings.tp,
        mem_fraction=settings.mem_fraction,
        engine=settings.engine,
        profile=settings.profile,
        calibration=settings.calibration,
        settings=scheduler,
        kv_dtype=_kv_dtype(settings),
        fp8_activations=settings.fp8_activations,
        adapters=RECORDED if scheduler.get("max_loras") else None,
        max_lora_rank=settings.max_lora_rank,
    )
    config, kv = configure(scenario, model, gpu)
    lora = lora_of(scenario, config)
    calibration = calibration_of(scenario, model, gpu)
    log.info("batches take the time of: %s", calibration.line)
    kinds: dict[str, Any] = {"kv_dtype": scenario.kv_dtype, "fp8_activations": scenario.fp8_activations}
    cost = calibration.cost_model(base_cost_model(model, gpu, scenario.parallelism, lora=lora, **kinds))
    clock = HostClock(start_us=keeper.start_us if keeper is not None else 0)
    named = choose_backend(settings.grammar_backend)
    grammars = None
    if named and settings.tokenizer is not None:
        ends = tuple(dict.fromkeys((vocabulary.end, *config.eos_token_ids)))
        grammars = make_compilers(
            named, Path(settings.tokenizer) / "tokenizer.json", model.vocab, ends, _grammar_limits(settings)
        )
    executor = EmulatedExecutor(
        EmulatedTimes(cost, seed=settings.seed, speed=settings.speed, adapters=lora is not None),
        vocabulary,
        config.rows_max,
        clock,
        script=script,
        matchers=None if grammars is None else grammars.matchers,
    )

    no_grammars = "an emulated engine has a vocabulary for it only with --tokenizer DIR"
    if not named:
        no_grammars = "this engine has no grammar backend; install llguidance, and leave --grammar-backend at auto"

    journal: DurableJournal | None = None
    engine = Engine(config) if keeper is None else None
    if keeper is not None:
        host = HostHeader(kind=EMULATED, model=model.name, gpu=gpu.name, tp=settings.tp, speed=settings.speed)
        engine, journal = keeper.begin(JournalHeader(config=config, seed=settings.seed, host=host.entries()))
    assert engine is not None

    def check(request: RequestArrived) -> None:
        """Refuse a request that an emulated model cannot serve. Raises ConfigError."""
        largest = int(np.frombuffer(prompt_bytes(request.prompt), np.int32).max(initial=0))
        if largest >= model.vocab:
            raise ConfigError(f"`prompt` holds token {largest}, but the model has {model.vocab}")
        if request.grammar is not None and grammars is None:
            raise ConfigError(f"`grammar` requests structured output: {no_grammars}")
        if request.kind != "generate" or request.return_hidden_states:
            raise ConfigError(f"`kind` is {request.kind}, but an emulated engine has no hidden states")
        if request.logprob_start is not None or (request.sampling is not None and request.sampling.top_logprobs):
            raise ConfigError("`logprobs` are requested, but an emulated engine has no logits")
        if request.sampling is not None and (request.sampling.allowed_token_ids or request.sampling.logit_processors):
            name = "allowed_token_ids" if request.sampling.allowed_token_ids else "logit_processors"
            raise ConfigError(f"`{name}` is requested, but an emulated engine has no logits")

    def watch(request: RequestArrived) -> Watch:
        ids = np.frombuffer(prompt_bytes(request.prompt), np.int32).tolist()
        return watch_of(text, ids, request.stop_texts, request.stop_regexes)

    on_adapters = None if lora is None else RowAdapters()
    meter = DriftMeter(cost, settings.speed, on_adapters) if settings.calibration is not None else None
    observe = None if meter is None else meter.fold
    weights = WeightsLog() if keeper is None else keeper.weights
    weights_bytes, bus_gbs = model.weights_bytes(None, scenario.parallelism), gpu.datasheet["pcie_gbs"].value
    executor.weights_version = weights.version
    cache = None
    if lora is not None:
        size = slot_bytes(model, scenario.parallelism, lora)
        cache = EmulatedAdapterCache(size, adapter_link(gpu), clock, speed=settings.speed)
    handover = None
    if settings.hands_over and place is not None:
        page_bytes = round(TransferBytes.of(model, scenario.kv_dtype, hybrid=False).token * config.page_size)
        rate_gbs = NETWORK_GBS.value * settings.tp
        kv_transport = EmulatedTransport(model.name, config.page_size, page_bytes, rate_gbs, speed=settings.speed)
        handover = _side(settings, place, kv_transport)
    runtime_host = RuntimeHost(
        engine,
        executor,
        journal or NoJournal(),
        clock,
        requests=RequestServices(
            check, watch, None if grammars is None else grammars.compiler, settings.receive_interval
        ),
        device=DeviceServices(
            weight_loader=EmulatedWeightLoader(executor, weights_bytes, bus_gbs, speed=settings.speed),
            adapters=cache,
            handover=handover,
        ),
        earlier=EarlierGeneration(weights) if keeper is None else keeper.earlier_generation(),
        observe=observe,
    )

    registry = None
    if cache is not None:
        registry = AdapterRegistry(runtime_host, cache, emulated_source)
        sources = {name: emulated_source(path) for name, path in settings.lora.items()}
        registry.begin(sources, restarted=keeper is not None and keeper.death is not None)

    def serve() -> None:
        try:
            runtime_host.run()
        except Exception:
            log.exception("the engine failed")  # every waiting client receives the error

    thread = threading.Thread(target=serve, name="lockstep-host", daemon=True)

    def start() -> None:
        if handover is not None:
            handover.attach(runtime_host)
        thread.start()

    def close() -> None:
        runtime_host.stop()
        if thread.is_alive():
            thread.join()
        if handover is not None:
            handover.close()
        if grammars is not None:
            grammars.compiler.close()
        if journal is not None:
            journal.close()

    info = _info(
        config,
        model=model.name,
        kind="emulated",
        vocabulary=model.vocab,
        logprobs=False,
        device=f"{settings.tp} x {gpu.name}, emulated",
        grammars="" if grammars is None else grammars.backend,
        no_grammars=no_grammars,
    )
    memory = "the size of the page pool is a setting" if kv is None else _memory(kv.describe())
    unit = EngineUnit(
        host=runtime_host,
        info=info,
        memory=memory,
        start=start,
        close=close,
        keeper=keeper,
        adapters=registry,
        grammars=None if grammars is None else grammars.compiler,
        handover=handover,
    )
    return unit if meter is None else replace(unit, drift=meter.read)


def _vocabulary(text: Texts, size: int, settings: ServeSettings) -> Any:
    """Return the vocabulary of emulated answers: the longest span of ids without special tokens. Raises ConfigError."""
    from lockstep.api.emulate import Vocabulary

    mean_tokens = settings.answer_tokens
    if not isinstance(text, Text):
        if size <= FIRST_WORD:
            raise ConfigError(f"`emulate`: {settings.emulate} has {size} tokens, too few\nhint: give a tokenizer")
        return Vocabulary(first=FIRST_WORD, count=size - FIRST_WORD, end=END, mean_tokens=mean_tokens)
    special = sorted(text.tokenizer.get_added_tokens_decoder())
    known = min(size, text.tokenizer.get_vocab_size(with_added_tokens=True))
    borders = [-1, *(token for token in special if token < known), known]
    first, stop = max(
        ((before + 1, behind) for before, behind in pairwise(borders)),
        key=lambda span: span[1] - span[0],
    )
    end = text.tokenizer.token_to_id(text.special_tokens().get("eos_token", ""))
    if end is None and (mean_tokens or settings.answers is not None):
        hint = "give answer_tokens 0, and no answers"
        raise ConfigError(f"`tokenizer`: {settings.tokenizer} names no eos_token\nhint: {hint}")
    closing = [text.tokenizer.token_to_id(one) for one in CLOSING]
    return Vocabulary(
        first=first,
        count=stop - first,
        end=end if end is not None else -1,
        mean_tokens=mean_tokens,
        closing=tuple(token for token in closing if token is not None and token < known),
    )


CLOSING = ('"', "}", "]", ",", ":", "0", "1", "n", "t", "-", "a")
"""Tokens that close JSON in byte-level vocabularies, the most preferred first."""


def _memory(parts: dict[str, Any]) -> str:
    """Return a table of the bytes that each part takes on one GPU."""
    rows = [(name.removesuffix("_bytes"), value) for name, value in parts.items() if name.endswith("_bytes")]
    lines = [f"{name.replace('_', ' '):12} {value / 1e9:9.2f} GB" for name, value in rows]
    return "\n".join([*lines, f"{'KV tokens':12} {parts['tokens']:9,}"])
