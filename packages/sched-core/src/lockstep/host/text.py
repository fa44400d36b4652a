"""Text in and out: a folder's tokenizer, its chat template, text as it streams, and stop texts.

A chat template is a program of a stranger: it runs in jinja2's sandbox, sees the conversation and nothing else, and
cannot reach Python. What decides about the time is given (`strftime_now`), so that a journal can say it.
"""

from __future__ import annotations

import json
import re
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jinja2
import jinja2.sandbox
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from lockstep.core.errors import ConfigError

Message = Mapping[str, Any]

GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
"""Some templates mark what the model says, for training; transformers knows this tag, jinja2 does not."""
CONTEXT = 32  # tokens in front of one that may decide how it is written: a space, bytes of one character


class Text:
    """The tokenizer of a Hugging Face folder.

    Raises: ConfigError, from the constructor, if the folder has none that can be read.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # of whatever kind: the library raises plain Exception
            raise ConfigError(
                f"`{path}` cannot be read: {error}\n"
                "hint: give token ids instead of text, or make tokenizer.json with transformers' save_pretrained"
            ) from error
        self.settings = _read_json(folder / "tokenizer_config.json")
        self._template_source = _template(folder, self.settings)
        self._template: jinja2.Template | None = None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids; with `special`, what the tokenizer puts around every text as well."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def characters_max(self) -> int:
        """Of text, the most that one token of the vocabulary can stand for."""
        return max(map(len, self.tokenizer.get_vocab(with_added_tokens=True)), default=1)

    def decode(self, ids: Sequence[int]) -> str:
        """Text, without special tokens."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def stream(self, prompt_ids: Sequence[int]) -> Callable[[int], str]:
        """Decode token by token behind a prompt: a function that gives the text that a token completes, often ""."""
        recent = [token for token in prompt_ids[-CONTEXT:] if token >= 0]
        stream = DecodeStream(ids=list(recent), skip_special_tokens=True)

        def step(token: int) -> str:
            nonlocal stream
            before = list(recent)
            recent.append(token)
            del recent[:-CONTEXT]
            try:
                return stream.step(self.tokenizer, token) or ""
            except Exception:  # of no other kind: bytes that looked like a character are none, with what follows them
                stream = DecodeStream(ids=list(recent), skip_special_tokens=True)
                return self.decode([*before, token])[len(self.decode(before)) :]

        return step

    def chat(
        self, messages: Sequence[Message], *, now: Callable[[], time.struct_time] = time.localtime, **more: Any
    ) -> str:
        """A conversation as the model's template writes it, ready for the answer.

        Args:
            messages: {"role": ..., "content": ...} each; what else a template knows goes into `more`, e.g. tools.
        Raises: ConfigError if the folder has no template, or it refuses this conversation.
        """
        if self._template_source is None:
            raise ConfigError("this model's folder has no chat template\nhint: give a prompt instead of messages")
        given = {"add_generation_prompt": True, "tools": None, "documents": None} | self.special_tokens() | more
        try:
            if self._template is None:
                self._template = _environment().from_string(self._template_source)
            given["strftime_now"] = lambda format_: time.strftime(format_, now())
            return self._template.render(messages=[dict(message) for message in messages], **given)
        except Exception as error:  # of any kind: a template is a program of a stranger
            raise ConfigError(f"the chat template refuses the conversation: {error}") from error

    def special_tokens(self) -> dict[str, str]:
        """`bos_token` and the like, as templates call them."""
        found = {}
        for name, value in self.settings.items():
            if name.endswith("_token"):
                text = value.get("content") if isinstance(value, dict) else value
                if isinstance(text, str):
                    found[name] = text
        return found


class Spelling(Protocol):
    """What knows the text of tokens as they come; `Text` does."""

    def stream(self, prompt_ids: Sequence[int]) -> Callable[[int], str]:
        """Decode token by token behind a prompt: a function that gives the text that a token completes, often ""."""


class StopTexts:
    """The text of one request, watched for texts at which it stops.

        text     | the answer begins . . . and goes on </en
        tokens   |  0  |  1  |  2  |  3  | ...  | n-1 | n  |      n - 1 and n may begin "</end>": 2 are held back

    A token that completes no character yet is held back as well. Numbers count output tokens from 0; one that was
    pushed before takes the text back to that place, as when a request draws a token again after a retraction.
    """

    def __init__(self, text: Spelling, prompt_ids: Sequence[int], stops: Sequence[str]) -> None:
        self._text, self._prompt_ids = text, list(prompt_ids)
        self._stops = [stop for stop in stops if stop]
        self._begin()

    def _begin(self) -> None:
        self.decoded = ""
        self._tokens: list[int] = []
        self._ends: list[int] = []  # characters there are behind each token
        self._step = self._text.stream(self._prompt_ids)

    def push(self, number: int, token: int) -> tuple[bool, int]:
        """Whether the text ran into a stop, and how many of the newest tokens may be the beginning of one."""
        if number < len(self._tokens):
            kept = self._tokens[:number]
            self._begin()
            for one in kept:
                self._append(one)
        before = len(self.decoded)
        self._append(token)
        if self.stopped_at(before) is not None:
            return True, 0
        free = self._free()
        first = bisect_right(self._ends, free)
        while first and self._silent(first - 1):  # tokens that begin the character
            first -= 1
        return False, len(self._ends) - first

    def _silent(self, number: int) -> bool:
        """Whether a token completed no character."""
        return self._ends[number] == (self._ends[number - 1] if number else 0)

    def stopped_at(self, checked: int = 0) -> int | None:
        """Where the first stop begins, if any is in the text; characters before `checked` were seen before."""
        found = [self.decoded.find(stop, max(0, checked - len(stop) + 1)) for stop in self._stops]
        return min((at for at in found if at >= 0), default=None)

    def _append(self, token: int) -> None:
        self.decoded += self._step(token)
        self._tokens.append(token)
        self._ends.append(len(self.decoded))

    def _free(self) -> int:
        """Characters that cannot belong to a stop that is still to come."""
        longest = max(map(len, self._stops), default=0)
        for start in range(max(0, len(self.decoded) - longest + 1), len(self.decoded)):
            if any(stop.startswith(self.decoded[start:]) for stop in self._stops):
                return start
        return len(self.decoded)


def _read_json(path: Path) -> dict[str, Any]:
    """What a JSON file holds; nothing if it is not there."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"`{path}` cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"`{path}` must hold an object, got a {type(content).__name__}")
    return content


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The chat template: of its own file, or of tokenizer_config.json, there perhaps one of several by name."""
    path = folder / "chat_template.jinja"
    template = path.read_text("utf-8") if path.is_file() else settings.get("chat_template")
    if isinstance(template, list):
        template = next((one["template"] for one in template if one.get("name") == "default"), None)
    if not isinstance(template, str):
        return None
    return GENERATION.sub(lambda tag: f"{tag[1]}{'endif' if tag[2] else 'if true'}{tag[3]}", template)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """What templates of Hugging Face folders expect, and no more."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = tojson
    return environment
