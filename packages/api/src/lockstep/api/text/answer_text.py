"""The text of an answer while it comes: characters as they are complete, and nothing behind a stop.

    tokens   | The | answer | is | é¹ | é² |     é² completes the character that é¹ begins
    text     | The   answer   is |    é    |

The engine keeps tokens back that may begin a stop text, so what comes here never begins one that ends later.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.api.processes.wire import SampleEnded
from lockstep.api.text.plain_text import Texts
from lockstep.host.text import StopTexts


class AnswerText:
    """Spells one sample.

    Args:
        stops: texts at which it ends; the text in front of the first is the answer, with `include_stop` that, too.
        stop_token_ids: tokens at which it ends, which are no part of the text.
        min_tokens: stop texts that are complete before there are so many tokens do not count.
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
    ) -> None:
        self._include_stop, self._stop_token_ids, self._min_tokens = include_stop, stop_token_ids, min_tokens
        self._stops = [stop for stop in stops if stop]
        self._watch = StopTexts(text, prompt_ids, stops) if text is not None and self._stops else None
        self._step = text.stream(prompt_ids) if text is not None and not self._stops else None
        self._spelled = 0  # tokens
        self._shown = 0  # characters that were given out, of the watch's
        self.stop_reason: int | str | None = None  # the token or the text at which it stopped, if somebody asked for it
        self.characters = 0  # given out in all
        self.starts: list[int] = []  # of each token: the characters in front of it

    def spell(self, tokens: Sequence[int], ended: SampleEnded | None) -> str:
        """What is new of the text of all tokens so far; after the end, all that is left."""
        until = len(tokens)
        if ended is None and self._step is not None and until == self._spelled + 1:  # as most often
            self.starts.append(self.characters)
            self._spelled = until
            new = self._step(tokens[-1])
            self.characters += len(new)
            return new
        if ended is not None and ended.reason == "stop" and tokens:
            if tokens[-1] in self._stop_token_ids:
                self.stop_reason = tokens[-1]
            if not self._include_stop:
                until -= 1  # the token says that the answer is over, and is no part of it
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
        self._spelled = max(self._spelled, until)
        decoded = self._watch.decoded
        stop = len(decoded)
        if ended is not None and ended.reason == "text_stop":
            at = self._watch.stopped_at(self.starts[min(self._min_tokens, until) - 1] if self._min_tokens else 0)
            if at is not None:
                self.stop_reason = next(one for one in self._stops if decoded.startswith(one, at))
                stop = at + (len(self.stop_reason) if self._include_stop else 0)
        new = decoded[self._shown : stop]
        self._shown = max(self._shown, stop)
        self.characters = self._shown
        return new
