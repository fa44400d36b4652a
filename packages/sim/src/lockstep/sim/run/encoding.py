"""Encoders of a simulated engine: checks of their options, their memory beside the KV, and their lane."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, cast, get_args

from lockstep.core.contract.config import SchedConfig
from lockstep.core.contract.errors import ConfigError
from lockstep.sim.catalogue import load_encoders
from lockstep.sim.cost import CapacityError, GpuSpec, KvCapacity
from lockstep.sim.cost.capacity import StageBytes
from lockstep.sim.cost.encoder import EncoderCost, Encoders, EncoderTpMode, MediaContent
from lockstep.sim.cost.hardware import network_of
from lockstep.sim.host.encoder_lane import ENCODER_GPUS_MAX, EncoderLane, MediaSink
from lockstep.sim.workload.media import parse_media
from lockstep.sim.workload.turns import Turns

if TYPE_CHECKING:
    from lockstep.sim.scenario.scenario import Scenario

CACHE_TOKENS = 16_384  # tokens for which memory is reserved if the encoder cache has no limit


def check_encoding(scenario: Scenario) -> None:
    """Raise ConfigError for options without effect, out of range, or not simulated together."""
    if scenario.mm_encoder_tp_mode not in get_args(EncoderTpMode):
        raise ConfigError(f"`mm_encoder_tp_mode` must be weights or data, got `{scenario.mm_encoder_tp_mode}`")
    if not 0 <= scenario.encoder_gpus <= ENCODER_GPUS_MAX:
        raise ConfigError(
            f"`encoder_gpus` must be from 0 (the engine's) to {ENCODER_GPUS_MAX:,}, got `{scenario.encoder_gpus}`"
        )
    if scenario.media is None:
        given = {"mm_encoder_tp_mode": scenario.mm_encoder_tp_mode != "weights", "encoder_gpus": scenario.encoder_gpus}
        given["encoder_budget_tokens"] = scenario.settings.get("encoder_budget_tokens") is not None
        usual = SchedConfig().encoder_cache_tokens  # settings read from a journal contain the default
        given["encoder_cache_tokens"] = scenario.settings.get("encoder_cache_tokens", usual) != usual
        for name, is_given in given.items():
            if is_given:
                value = scenario.settings[name] if name in scenario.settings else getattr(scenario, name)
                raise ConfigError(
                    f"`{name}` is about media, and there are none, got `{'none' if value is None else value}`\n"
                    "hint: --media image=0.3x1..4:1024x768, or leave it out"
                )
        return
    parse_media(scenario.media)
    if scenario.encoder_gpus and scenario.mm_encoder_tp_mode == "data":
        raise ConfigError(
            f"`encoder_gpus` is {scenario.encoder_gpus}, each of which has the encoder whole, and `mm_encoder_tp_mode` "
            "data is about those of the engine\nhint: leave out one of the two"
        )
    if scenario.mm_encoder_tp_mode == "data" and encoder_tp(scenario) == 1:
        if scenario.tp == 1:
            raise ConfigError(
                "`mm_encoder_tp_mode` is data, the encoder whole on each of several GPUs, but `tp` is 1\n"
                "hint: --tp 2 or more, or leave it out"
            )
        raise ConfigError(
            f"`mm_encoder_tp_mode` is data, the encoder whole on each of several GPUs, but a rank has one: `tp` is "
            f"{scenario.tp}, `attention_dp` {scenario.attention_dp}\n"
            "hint: leave it out, each rank then has the encoder whole on its GPU"
        )


def encoder_tp(scenario: Scenario) -> int:
    """Return the number of GPUs that share the encoder: those of the engine, or of a rank with its own scheduler."""
    return gpus_of_a_scheduler(scenario.tp, scenario.attention_dp, rank_schedulers=scenario.rank_schedulers)


def gpus_of_a_scheduler(tp: int, attention_dp: int, *, rank_schedulers: bool) -> int:
    """Return the number of GPUs of an engine, or of a rank if ranks have schedulers; at least 1."""
    return max(tp // max(attention_dp, 1), 1) if rank_schedulers else tp


def encoder_tp_mode(scenario: Scenario) -> str:
    """Return the mode of one engine of a cluster: `weights` if one GPU has the encoder, where `data` has no meaning."""
    return "weights" if scenario.media is not None and encoder_tp(scenario) == 1 else scenario.mm_encoder_tp_mode


@dataclass(frozen=True, kw_only=True)
class EncoderSetup:
    """The encoder of an engine, and all contents of the workload."""

    cost: EncoderCost
    gpus: int  # separate GPUs; 0: the encoder is on `shared_with`
    contents: Mapping[bytes, MediaContent]  # by digest
    shared_with: str = "the engine's GPUs"

    @classmethod
    def of(cls, scenario: Scenario, gpu: GpuSpec, turns: Turns) -> EncoderSetup:
        """Return the encoder of a scenario with media. Raises ConfigError, CatalogueError or CapacityError."""
        assert turns.media is not None
        return cls(
            cost=encoder_cost(scenario, gpu),
            gpus=scenario.encoder_gpus,
            contents=turns.media.contents(),
            shared_with=_shared_with(scenario),
        )

    def lane(self, sink: MediaSink) -> EncoderLane:
        """Return a new encoder lane for one engine, which reports to the engine's metrics."""
        return EncoderLane(self.cost, self.contents, self.gpus, sink)

    def slowed(self, factor: float) -> EncoderSetup:
        """Return a copy with all times multiplied by `factor`."""
        one = self.cost
        cost = EncoderCost(one.encoders, one.gpu, one.tp, one.mode, one.factor * factor)
        return replace(self, cost=cost)

    def doubts(self, config: SchedConfig) -> list[str]:
        """Return the limits of the simulation of media, one sentence each."""
        where = f"{self.gpus} GPUs of its own, whose price is in no figure" if self.gpus else self.shared_with
        lines = [f"the encoder is on {where}, and its times are uncalibrated"]
        if not self.gpus and config.encoder_budget is None:
            lines.append(
                "encoder_budget_tokens is not set: decodes wait for as many media as come at once; "
                "vLLM encodes up to a batch's tokens (2,048 to 16,384) in one go"
            )
        return lines

    def describe(self) -> dict[str, Any]:
        """Return encoder, contents and links with their sources, for metrics.json."""
        rate, latency = network_of(self.cost.gpu)
        network = {"network_gbs": asdict(rate), "network_latency_us": asdict(latency)}
        found = {"contents": len(self.contents), "gpus": self.gpus, **self.cost.describe()}
        return found | (network if self.gpus else {})


def _shared_with(scenario: Scenario) -> str:
    """Return the GPUs, as text, on which an encoder without separate GPUs runs."""
    if scenario.rank_schedulers:
        return f"each rank's GPUs{' of the first stage' if scenario.pp > 1 else ''}, for its own requests"
    return "the GPUs of the first stage" if scenario.pp > 1 else "the engine's GPUs"


def encoder_cost(scenario: Scenario, gpu: GpuSpec) -> EncoderCost:
    """Return the cost of encoding. Raises CapacityError if the encoder cannot be split over its GPUs."""
    encoders = encoders_of(scenario)
    if scenario.encoder_gpus:
        return EncoderCost(encoders, gpu, 1, "weights")
    return EncoderCost(encoders, gpu, encoder_tp(scenario), cast(EncoderTpMode, scenario.mm_encoder_tp_mode))


def beside_encoder(
    capacity: Callable[[StageBytes], KvCapacity], scenario: Scenario, gpu: GpuSpec, config: SchedConfig
) -> KvCapacity:
    """Return the KV capacity beside the encoder and the encoder cache.

    The encoder counts as weights, and the encoder cache, which each GPU of the engine has, as activations. With several
    stages both are on the first stage.
    Args:
        capacity: function that returns the KV capacity, given the bytes on the first stage besides the language model.
    Raises: CapacityError if nothing is left for KV.
    """
    cost = encoder_cost(scenario, gpu)
    weights = 0 if scenario.encoder_gpus else cost.weights_bytes()
    cache = (config.encoder_cache_tokens or CACHE_TOKENS) * cost.encoders.embedding_bytes
    alone = capacity(StageBytes())
    try:
        return capacity(StageBytes(weights, cache))
    except CapacityError as error:
        left = alone.stages_left_bytes[0] if alone.stages_left_bytes else alone.kv_bytes
        where = "leaves" if not alone.stages_left_bytes else "leaves in its first stage"
        raise CapacityError(
            f"{cost.encoders.model} {where} {left / 1e9:.1f} GB for KV; its encoder takes {weights / 1e9:.1f} GB "
            f"of them, and what it made up to {cache / 1e9:.1f} GB\n"
            "hint: raise --tp, or lower --encoder-cache-tokens"
        ) from error


def encoders_of(scenario: Scenario) -> Encoders:
    """Return the media encoders of the scenario's model. Raises ConfigError if it has none."""
    encoders = load_encoders(scenario.model)
    if encoders is None:
        raise ConfigError(
            f"`media` is `{scenario.media}`, but {scenario.model} takes text alone\n"
            "hint: a model with an encoder, such as --model qwen2.5-vl-7b, qwen3-vl-8b, gemma-3-27b or qwen2-audio-7b"
        )
    return encoders
