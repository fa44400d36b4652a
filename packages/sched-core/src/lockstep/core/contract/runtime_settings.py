"""Settings that follow from the model or from options of the engine, so that no runtime takes them by name."""

from __future__ import annotations

from lockstep.core.contract.errors import ConfigError


def runtime_refusal(name: str) -> str:
    """Return why no runtime takes a setting by name, with a hint; "" if a runtime does."""
    if name == "tiers":
        return (
            "`tiers` (host memory and storage below the device's cache) follow from options of the engine\n"
            "hint: --host-cache-gb 20, and below it --storage DIR --storage-gb 200"
        )
    if name == "hybrid":
        return (
            "`hybrid` follows from the model and from options of the engine\n"
            "hint: --swa-full-tokens-ratio, --mamba-full-memory-ratio, --mamba-track-interval"
        )
    if name == "experts":
        return (
            "`experts` (their placement on ranks) follows from the model and from options of the engine\n"
            "hint: --tp N --ep N --eplb, --redundant-experts, --eplb-interval"
        )
    if name == "diffusion":
        return (
            "`diffusion` (the blocks in which a model answers) follows from the model\n"
            "hint: a folder of SDARForCausalLM; lockstep simulate has --diffusion-block"
        )
    if name in ("dp_ranks", "dp_rank"):
        return (
            f"`{name}` follows from the data-parallel ranks of the engine\n"
            "hint: lockstep serve --tp N --attention-dp N --rank-schedulers"
        )
    return ""


def refuse_in_runtime(name: str) -> None:
    """Raise ConfigError for a setting that no runtime takes by name."""
    if why := runtime_refusal(name):
        raise ConfigError(why)
