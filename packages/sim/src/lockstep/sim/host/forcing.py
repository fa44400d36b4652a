"""The simulator's model of tokens that grammars force: after a drawn token, some tokens are forced with a chance.

    forcing = Forcing.of("0.12x2", seed=7)     # after a drawn token, with a chance of 0.12, the next two are forced
    forcing.runs(request=3).stop_behind(5)     # output 5 exists: outputs [6:stop) are forced

A hash of seed, request and output decides after each drawn token. So a run does not depend on the order of its batches,
and a retracted request has the same forced tokens when it runs again.
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


# mechanism: jump-forward (simulated)
@dataclass(frozen=True)
class Forcing:
    """The frequency and the length of runs of forced tokens."""

    chance: float  # probability that forced tokens follow a drawn token
    tokens: int  # length of a run of forced tokens
    seed: int
    source: str

    @classmethod
    def of(cls, text: str | None, seed: int) -> Forcing:
        """Parse CHANCExTOKENS; None is DEFAULT_FORCES. Raises ConfigError."""
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
        """Return the forced tokens of a request, given its number in the workload."""
        return ForcedRuns(self, request)

    def describe(self) -> dict[str, Any]:
        """Return chance, length and source, for metrics.json."""
        return {"chance": self.chance, "tokens": self.tokens, "source": self.source}


class ForcedRuns:
    """The runs of forced tokens of one request, computed in ascending order of outputs."""

    def __init__(self, forcing: Forcing, request: int) -> None:
        self._forcing, self._request = forcing, request
        self._drawn, self._stop = -1, 0  # last drawn output so far; outputs [_drawn + 1:_stop) are forced

    def stop_behind(self, output: int) -> int:
        """Return the first output after `output` that is not forced. Call it with ascending outputs."""
        while self._stop <= output:
            self._drawn = self._stop
            keys = np.array([self._request], np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(self._drawn)
            forced = float(uniform_of(mixed(keys, self._forcing.seed + 2))[0]) < self._forcing.chance
            self._stop = self._drawn + 1 + (self._forcing.tokens if forced else 0)
        return self._stop
