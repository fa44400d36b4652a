"""Tokens that grammars force, as the simulator sees them: how often a token leaves no choice behind it.

    forcing = Forcing.of("0.12x2", seed=7)     # behind a drawn token, with a chance of 0.12, the next two are forced
    forcing.runs(request=3).stop_behind(5)     # output 5 is there: outputs [6:stop) are forced

One number, a hash of seed, request and output, decides behind each token that was drawn, so a run does not depend on
the order of its batches, and a request that comes back after a retraction is forced to say what it was before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.core.contract.errors import ConfigError
from lockstep.sim.host.speculation import mixed, uniform_of

DEFAULT_FORCES = "0.12x2"
FORCES_SOURCE = (
    "measured: llguidance 1.9 over 60 random JSON schemas and a tokenizer of 2,048 words forced behind 12 % of 1,502 "
    "drawn tokens, 1.7 at a time; schemas with long names of properties do better"
)


@dataclass(frozen=True)
class Forcing:
    """How often, and how many."""

    chance: float  # behind a token that was drawn
    tokens: int  # that are forced then
    seed: int
    source: str

    @classmethod
    def of(cls, text: str | None, seed: int) -> Forcing:
        """Read CHANCExTOKENS; None is the default. Raises ConfigError."""
        chance, times, tokens = (DEFAULT_FORCES if text is None else text).partition("x")
        try:
            found = cls(float(chance), int(tokens), seed, "given" if text is not None else FORCES_SOURCE)
        except ValueError:
            found = None
        if found is None or not times or not 0.0 <= found.chance <= 1.0 or not 1 <= found.tokens <= 64:
            raise ConfigError(
                f"`grammar_forces` must be CHANCExTOKENS, a chance from 0 to 1 and 1 to 64 tokens, got `{text}`\n"
                "hint: 0.1x4 forces four tokens behind every tenth that is drawn"
            )
        return found

    def runs(self, request: int) -> ForcedRuns:
        """Those of a request, by its number in the workload."""
        return ForcedRuns(self, request)

    def describe(self) -> dict[str, Any]:
        """For metrics.json."""
        return {"chance": self.chance, "tokens": self.tokens, "source": self.source}


class ForcedRuns:
    """What is forced of one request; to be asked for outputs in rising order."""

    def __init__(self, forcing: Forcing, request: int) -> None:
        self._forcing, self._request = forcing, request
        self._drawn, self._stop = -1, 0  # the last token looked at that was drawn; what is behind it is forced up to

    def stop_behind(self, output: int) -> int:
        """Number of the first output behind this one that is not forced, `output` + 1 where none is."""
        while self._stop <= output:
            self._drawn = self._stop
            keys = np.array([self._request], np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(self._drawn)
            forced = float(uniform_of(mixed(keys, self._forcing.seed + 2))[0]) < self._forcing.chance
            self._stop = self._drawn + 1 + (self._forcing.tokens if forced else 0)
        return self._stop
