"""PD multiplexing: the settings of an engine whose device computes prompts beside decodes (features/multiplexing.py).

Prefill and decode get disjoint shares of the device's streaming multiprocessors (SMs). `divisions` has the shares from
a number of decode rows on. Divisions that an operator does not give follow from the device (`even_divisions`): SGLang's
rule for green contexts, which need SMs in multiples of the architecture's.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from lockstep.core.contract.errors import ConfigError

TOKEN_BUDGET = 65536  # new tokens times layers of one launch of a prompt's layers: SGLang's split_forward_token_budget
GROUPS = 8  # shares of the device, the whole for prefill and the whole for decode among them: SGLang's sm_group_num
DECODE_ROWS = 36  # rows from which on decodes get their largest share: SGLang's decode_bs_divisor
DECODE_SMS_MIN = 16  # of a division that follows from the device: SGLang's bound
SMS_MULTIPLE = {8: (4, 2), 9: (8, 8), 10: (8, 8), 12: (8, 8)}
"""Per major compute capability: the fewest SMs of a green context, and the number of which it has a multiple."""


class Division(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many SMs compute prompts, and how many decodes, while both run."""

    prefill_sms: int
    decode_sms: int
    decode_rows: int = 0  # applies from so many decode rows on


class Multiplexing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """PD multiplexing of one engine. `divisions` are in ascending order of their decode rows."""

    layers: int  # of the model
    sms: int = 1  # of the device
    divisions: tuple[Division, ...] = ()  # empty: the device is not divided, as a CPU, and plans name no SMs
    token_budget: int = TOKEN_BUDGET

    def layers_at_once(self, new_tokens: int) -> int:
        """Return how many layers of a prefill batch with so many new tokens are launched at once."""
        return max(1, self.token_budget // new_tokens)

    # mechanism: pd-multiplexing (decided)
    def division_for(self, decode_rows: int) -> Division | None:
        """Return the shares of the device while so many requests decode beside a prompt; None: it is not divided."""
        if not self.divisions:
            return None
        found = self.divisions[0]
        for division in self.divisions:
            if division.decode_rows <= decode_rows:
                found = division
        return found


def even_divisions(sms: int, major: int, groups: int = GROUPS, decode_rows: int = DECODE_ROWS) -> tuple[Division, ...]:
    """Return up to `groups - 2` divisions of a device, with more SMs for decodes the more rows decode.

    Prefill keeps at least half of the device, decodes at least DECODE_SMS_MIN.

    Args:
        sms: of the device; major: its major compute capability.
        groups: divisions and the two groups with the whole device.
        decode_rows: rows at which the last division is reached.
    Raises: ConfigError for a device that cannot be divided.
    """
    least, multiple = SMS_MULTIPLE.get(major, SMS_MULTIPLE[9])
    shares = [
        prefill
        for prefill in range(least, sms - least + 1, multiple)
        if prefill >= sms - prefill and sms - prefill >= DECODE_SMS_MIN
    ]
    count = groups - 2
    if not shares or count < 1:
        raise ConfigError(
            f"`multiplexing` needs a device that can be divided, got {sms} SMs in {groups} groups\n"
            f"hint: decodes need {DECODE_SMS_MIN} SMs and prefill as many as decodes; 3 groups are one division"
        )
    if len(shares) > count:
        shares = shares[:: max(1, len(shares) // count)][:count]
    shares.reverse()
    size = len(shares)
    return tuple(
        Division(prefill, sms - prefill, -(-i * decode_rows // size) if i > 1 else 0)
        for i, prefill in enumerate(shares, start=1)
    )


class MultiplexedSettings(Protocol):
    """The settings of SchedConfig that multiplexing is checked against."""

    @property
    def multiplexing(self) -> Multiplexing | msgspec.UnsetType: ...
    @property
    def batching(self) -> Any: ...
    @property
    def prefill_decode_interval(self) -> int: ...
    @property
    def overlap_consecutive_prefills(self) -> bool: ...
    @property
    def same_step_sharing(self) -> bool: ...
    @property
    def enable_priority_preemption(self) -> bool: ...
    @property
    def chunk_target_us(self) -> int | None: ...
    @property
    def speculates(self) -> bool: ...
    @property
    def jumps(self) -> bool: ...
    @property
    def splits_batches(self) -> bool: ...
    @property
    def pipelines(self) -> bool: ...
    @property
    def shares_passes(self) -> bool: ...
    @property
    def hands_over(self) -> bool: ...
    @property
    def diffusion(self) -> Any: ...
    @property
    def hybrid(self) -> Any: ...
    @property
    def expert_load_interval(self) -> Any: ...


def check_multiplexing(config: MultiplexedSettings) -> None:
    """Raise ConfigError for shares that are not those of the device, and for settings that do not go together."""
    settings = config.multiplexing
    if settings is msgspec.UNSET:
        return
    for name in ("layers", "sms", "token_budget"):
        value = getattr(settings, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"`multiplexing.{name}` must be a whole number of at least 1, got `{value}`")
    _check_divisions(settings)
    _refuse_beside(config)


def _check_divisions(settings: Multiplexing) -> None:
    before = -1
    for one in settings.divisions:
        shown = f"{one.prefill_sms}:{one.decode_sms}:{one.decode_rows}"
        if min(one.prefill_sms, one.decode_sms) < 1 or one.prefill_sms + one.decode_sms > settings.sms:
            raise ConfigError(
                f"`multiplexing.divisions` has {shown}, but both shares have at least one of the {settings.sms} SMs of "
                "the device, and together no more\nhint: prefill SMs, decode SMs, and from how many decode rows on"
            )
        if one.decode_rows <= before:
            raise ConfigError(
                f"`multiplexing.divisions` has {shown} behind a division from {before} decode rows on\n"
                "hint: list them in ascending order of decode rows, which count from 0"
            )
        before = one.decode_rows


def _refuse_beside(config: MultiplexedSettings) -> None:
    """Raise ConfigError for settings that do not go with prompts on a stream of their own."""
    beside: dict[str, tuple[bool, str]] = {
        "pp_size": (config.pipelines, "a stage has some of the layers, and microbatches keep the others busy"),
        "dp_ranks": (config.shares_passes, "ranks run every pass together"),
        "role": (config.hands_over, "prompts and decodes are on different engines already"),
        "two_batch_overlap": (config.splits_batches, "halves of a batch share the device already"),
        "batching": (config.batching != "prefill_first", "prompts and decodes are in different batches"),
        "prefill_decode_interval": (config.prefill_decode_interval > 0, "no prompt keeps decodes waiting"),
        "overlap_consecutive_prefills": (
            not config.overlap_consecutive_prefills,
            "the layers of a prompt follow each other on a stream of their own",
        ),
        "chunk_target_us": (config.chunk_target_us is not None, "no pass with prompts delays decodes"),
        "same_step_sharing": (config.same_step_sharing, "KV of a prompt is complete only behind its last layers"),
        "speculative_method": (config.speculates, "the drafter computes a prompt in one pass with the model"),
        "jump_forward_tokens": (config.jumps, "forced tokens may be verified beside prompts"),
        "diffusion": (
            config.diffusion is not msgspec.UNSET,
            "a block awaits the result before it",
        ),
        "hybrid": (config.hybrid is not msgspec.UNSET, "windows and states are laid out for whole passes"),
        "enable_priority_preemption": (
            config.enable_priority_preemption,
            "how many decodes run until the layers of a prompt are done is not known",
        ),
        "expert_load_interval": (
            config.expert_load_interval is not msgspec.UNSET,
            "the load of experts is counted by whole passes",
        ),
    }
    for name, (there, why) in beside.items():
        if there:
            shown = "set" if name in ("diffusion", "hybrid") else getattr(config, name)
            raise ConfigError(f"`multiplexing` is set and `{name}` is {shown}: {why}\nhint: drop one of the two")
