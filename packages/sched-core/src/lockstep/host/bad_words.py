"""Token sequences that an answer must not contain: vLLM's `bad_words`, as a grammar of its own kind.

    bad_words  ──tokenised──>  [[464, 13], [9]]  ──Grammar("bad_words", JSON)──>  BadWordsMatcher, one for each row

After the tokens of a sequence but its last one, its last token is left out of the mask. Only output tokens count: the
prompt does not begin a sequence. Such a grammar never ends an answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from lockstep.host.batches import Int32s

_decoder = msgspec.json.Decoder(list[list[int]])


class BadWords:
    """Token sequences that are not allowed: `lockstep.host.grammars.Compiled`.

    Args:
        source: JSON, a list of lists of token ids.
    Raises: ValueError for any other source, and for an empty sequence.
    """

    def __init__(self, source: str) -> None:
        try:
            sequences = _decoder.decode(source)
        except msgspec.DecodeError as error:
            raise ValueError(f"`bad_words` must be lists of token ids: {error}") from error
        if any(not sequence or min(sequence) < 0 for sequence in sequences):
            raise ValueError("`bad_words` has an empty sequence or a negative token id")
        self.always = [sequence[0] for sequence in sequences if len(sequence) == 1]
        self.behind: dict[int, list[list[int]]] = {}  # token before the last one of a sequence -> sequences
        for sequence in sequences:
            if len(sequence) > 1:
                self.behind.setdefault(sequence[-2], []).append(sequence)

    def matcher(self) -> BadWordsMatcher:
        """Return a matcher at the start of an answer."""
        return BadWordsMatcher(self)


class BadWordsMatcher:
    """The output tokens of one answer: `lockstep.host.grammars.Matcher`. Every token is accepted, end tokens too."""

    def __init__(self, words: BadWords) -> None:
        self._words = words
        self._tokens: list[int] = []

    def accept(self, token: int) -> bool:
        """Append a token."""
        self._tokens.append(token)
        return True

    def rollback(self, tokens: int) -> None:
        """Remove the last `tokens` tokens."""
        del self._tokens[len(self._tokens) - tokens :]

    # mechanism: bad-words (decided)
    def fill(self, mask: Int32s) -> None:
        """Write the allowed tokens: int32 [ceil(vocabulary / 32)], bit t % 32 of word t // 32."""
        mask[:] = -1
        banned = list(self._words.always)
        if self._tokens:
            for sequence in self._words.behind.get(self._tokens[-1], ()):
                before = sequence[:-1]
                if self._tokens[-len(before) :] == before:
                    banned.append(sequence[-1])
        if banned:
            ids = np.array(banned, np.int64)
            ids = ids[ids < 32 * len(mask)]
            bits = mask.view(np.uint32)
            np.bitwise_and.at(bits, ids // 32, ~(np.uint32(1) << (ids % 32).astype(np.uint32)))

    def is_done(self) -> bool:
        """Return False: the answer may always continue."""
        return False

    def forced(self) -> Sequence[int]:
        """Return no tokens."""
        return ()
