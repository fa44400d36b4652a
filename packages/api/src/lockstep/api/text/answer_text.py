"""Decoding of an answer as its tokens arrive: only complete characters, and nothing after a stop text.

    tokens   | The | answer | is | é¹ | é² |     é² completes the character that é¹ begins
    text     | The   answer   is |    é    |

The engine withholds tokens that may begin a stop text, and reports the stop text's end as the end of the answer. So the
text is searched once, at its end.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.api.processes.wire import SampleEnded
from lockstep.api.text.plain_text import Texts
from lockstep.host.stop_regexes import StopRegexes
from lockstep.host.stop_texts import TextEnd


# mechanism: stop-regexes (executed)
class AnswerText:
    """Decodes one sample to text.

    Args:
        stops: texts that end the answer. The answer is the text before the first one, with `include_stop` also the stop
            text.
        stop_token_ids: tokens that end the answer, which are not part of the text.
        min_tokens: stop texts that are complete within fewer tokens do not count.
        regexes: regular expressions that end the answer, like `stops`.
    """

    def __init__(
        self,
        text: Texts | None,
        prompt_ids: Sequence[int],
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        stop_token_ids: Sequence[int] = (),
        min_tokens: int = 0,
        regexes: Sequence[str] = (),
    ) -> None:
        self._include_stop, self._stop_token_ids, self._min_tokens = include_stop, stop_token_ids, min_tokens
        watched = text is not None and (any(stops) or bool(regexes))
        self._end = TextEnd(stops) if watched else None
        self._regexes = StopRegexes(text, prompt_ids, regexes) if text is not None and regexes else None
        self._searched = 0  # tokens searched for `regexes`
        self._step = text.stream(prompt_ids) if text is not None else None
        self._spelled = 0  # tokens decoded
        self.stop_reason: int | str | None = None  # the stop token or text that ended the answer; None: neither did
        self.characters = 0  # characters returned so far
        self.starts: list[int] = []  # for each token the number of characters before it

    def search(self, tokens: Sequence[int], most: int) -> bool:
        """Search `tokens`, all tokens so far, for the regular expressions, at most `most` of those that are new.

        Returns: whether all were searched. `spell` searches the rest.
        """
        if self._regexes is None:
            return True
        until = min(len(tokens), self._searched + most)
        for number in range(self._searched, until):
            self._regexes.push(number, tokens[number])
        self._searched = max(self._searched, until)
        return self._searched >= len(tokens)

    def spell(self, tokens: Sequence[int], ended: SampleEnded | None) -> str:
        """Return the new text of `tokens`, all tokens so far. If the answer `ended`, this is all text that is left."""
        until = len(tokens)
        if self._regexes is not None:
            self.search(tokens, until)
        if ended is None and self._step is not None and until == self._spelled + 1:  # the usual case: one new token
            self.starts.append(self.characters)
            self._spelled = until
            new = self._step(tokens[-1])
            self.characters += len(new)
            if self._end is not None:
                self._end.add(new)
            return new
        if ended is not None and ended.reason == "stop" and tokens:
            if tokens[-1] in self._stop_token_ids:
                self.stop_reason = tokens[-1]
            if not self._include_stop:
                until -= 1  # the last token ends the answer and is not part of the text
        new = self._plain(tokens, until)
        if self._end is not None:
            new = self._until_stop(self._end, new, ended)
        self.starts += [self.characters] * (len(tokens) - len(self.starts)) if until < len(tokens) else []
        return new

    def _plain(self, tokens: Sequence[int], until: int) -> str:
        if self._step is None:
            return ""
        new = ""
        for number in range(self._spelled, until):
            token = tokens[number]
            self.starts.append(self.characters)
            text = self._step(token)
            self.characters += len(text)
            new += text
        self._spelled = max(self._spelled, until)
        return new

    def _until_stop(self, end: TextEnd, new: str, ended: SampleEnded | None) -> str:
        """Return the part of the newest text that is before the stop text or match, if one ended the answer."""
        if new:
            end.add(new)
        if ended is None or ended.reason != "text_stop":
            return new
        found = end.stop(self.starts[min(self._min_tokens, self._spelled) - 1] if self._min_tokens else 0)
        match = None if self._regexes is None else self._regexes.match
        if match is not None and match.number == self._spelled - 1 and (found is None or match.start < found[0]):
            self.stop_reason = match.pattern
            stop = match.stop if self._include_stop else match.start
        elif found is not None:
            at, self.stop_reason = found
            stop = at + (len(found[1]) if self._include_stop else 0)
        else:
            return new
        shown = end.characters - len(new)
        self.characters = max(shown, stop)
        return new[: self.characters - shown]
