"""Settings of the memory of models whose layers differ."""

from __future__ import annotations

import msgspec

from lockstep.core.contract.errors import ConfigError


class HybridMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory of layers without full attention (docs/hybrid.md): sliding windows, linear attention, or both.

    The interval of checkpoints is SGLang's `mamba_track_interval`.
    """

    window_tokens: int = 0  # positions that a sliding layer sees, including the token's own; 0: no such layers
    window_pages: int = 0  # pages of the sliding layers' pool
    state_slots: int = 0  # slots of linear attention: one for each running request, and checkpoints; 0: no such layers
    checkpoint_tokens: int = 256  # states are kept at positions that are multiples of this
    # beside active requests a prompt starts with no fewer tokens for lack of window pages; unset: with any number
    chunk_tokens_min: int | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        for name in ("window_tokens", "window_pages", "state_slots", "checkpoint_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"`hybrid.{name}` must be a whole number, 0 (none) or more, got `{value}`")
        if not self.window_tokens and not self.state_slots:
            raise ConfigError(
                "`hybrid` has neither `window_tokens` nor `state_slots`: all layers have full attention\n"
                "hint: leave hybrid out"
            )
        if bool(self.window_tokens) != bool(self.window_pages):
            raise ConfigError(
                f"`hybrid.window_tokens` is {self.window_tokens} and `hybrid.window_pages` {self.window_pages}: "
                "sliding layers need both, other models neither"
            )
        least = self.chunk_tokens_min
        if least is not msgspec.UNSET and (
            not self.window_tokens or not isinstance(least, int) or isinstance(least, bool) or least < 1
        ):
            raise ConfigError(
                f"`hybrid.chunk_tokens_min` must be a whole number of at least 1, for sliding windows, got `{least}`"
            )
        if self.state_slots == 1:
            raise ConfigError(
                "`hybrid.state_slots` must be 0 or at least 2, got `1`: a request that starts from a checkpoint needs "
                "a slot beside it"
            )

    def row_pages_max(self, page_size: int, ahead: int) -> int:
        """Return the most window pages that a decode may hold.

        These are the pages of its window, the page that it writes, and those of `ahead` positions that are in flight or
        written in the same launch (`SchedConfig.positions_ahead`).
        """
        return -(-(self.window_tokens - 1) // page_size) + 1 + -(-ahead // page_size)
