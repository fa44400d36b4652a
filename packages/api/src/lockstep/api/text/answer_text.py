"""Decoding of an answer as its tokens arrive: only complete characters, and nothing after a stop text.

    tokens   | The | answer | is | é¹ | é² |     é² completes the character that é¹ begins
    text     | The   answer   is |    é    |

The engine withholds tokens that may begin a stop text, so a stop text never begins in received tokens and ends in
later ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.api.processes.wire import SampleEnded
from lockstep.api.text.plain_text import Texts
from lockstep.host.stop_regexes import StopRegexes
from lockstep.host.text import StopTexts


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
        self._stops = [stop for stop in stops if stop]
        watched = text is not None and bool(self._stops or regexes)
        self._watch = StopTexts(text, prompt_ids, stops) if text is not None and watched else None
        self._regexes = StopRegexes(text, prompt_ids, regexes) if text is not None and regexes else None
        self._step = text.stream(prompt_ids) if text is not None and not watched else None
        self._spelled = 0  # tokens decoded
        self._shown = 0  # characters returned of the text in `_watch`
        self.stop_reason: int | str | None = None  # the stop token or text that ended the answer; None: neither did
        self.characters = 0  # characters returned so far
        self.starts: list[int] = []  # for each token the number of characters before it

    def spell(self, tokens: Sequence[int], ended: SampleEnded | None) -> str:
        """Return the new text of `tokens`, all tokens so far. If the answer `ended`, this is all text that is left."""
        until = len(tokens)
        if ended is None and self._step is not None and until == self._spelled + 1:  # the usual case: one new token
            self.starts.append(self.characters)
            self._spelled = until
            new = self._step(tokens[-1])
            self.characters += len(new)
            return new
        if ended is not None and ended.reason == "stop" and tokens:
            if tokens[-1] in self._stop_token_ids:
                self.stop_reason = tokens[-1]
            if not self._include_stop:
                until -= 1  # the last token ends the answer and is not part of the text
        new = self._watched(tokens, until, ended) if self._watch is not None else self._plain(tokens, until)
        self.starts += [self.characters] * (len(tokens) - len(self.starts)) if until < len(tokens) else []
        return new

    def _plain(self, tokens: Sequence[int], until: int) -> str:
        if self._step is None:
            return ""
        new = ""
        for token in tokens[self._spelled : until]:
            self.starts.append(self.characters)
            text = self._step(token)
            self.characters += len(text)
            new += text
        self._spelled = max(self._spelled, until)
        return new

    def _watched(self, tokens: Sequence[int], until: int, ended: SampleEnded | None) -> str:
        assert self._watch is not None
        for number in range(self._spelled, until):
            self.starts.append(len(self._watch.decoded))
            self._watch.push(number, tokens[number])
            if self._regexes is not None:
                self._regexes.push(number, tokens[number])
        self._spelled = max(self._spelled, until)
        decoded = self._watch.decoded
        stop = len(decoded)
        if ended is not None and ended.reason == "text_stop":
            at = self._watch.stopped_at(self.starts[min(self._min_tokens, until) - 1] if self._min_tokens else 0)
            match = None if self._regexes is None else self._regexes.match
            if match is not None and match.number == until - 1 and (at is None or match.start < at):
                self.stop_reason = match.pattern
                stop = match.stop if self._include_stop else match.start
            elif at is not None:
                self.stop_reason = next(one for one in self._stops if decoded.startswith(one, at))
                stop = at + (len(self.stop_reason) if self._include_stop else 0)
        new = decoded[self._shown : stop]
        self._shown = max(self._shown, stop)
        self.characters = self._shown
        return new
