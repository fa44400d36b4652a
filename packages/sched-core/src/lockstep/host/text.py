"""The text of requests: a folder's tokenizer, its chat template, and streamed text.

A chat template is untrusted code. It runs in jinja2's immutable sandbox, reads only the conversation, changes nothing,
and cannot reach Python. Its running time and output are bounded: every turn of a loop, every call and every piece of
output checks a `Budget`. The caller supplies the time for `strftime_now`, so that a journal can record it.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.filters
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from lockstep.core.contract.errors import ConfigError

Message = Mapping[str, Any]

GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
"""A tag with which some templates mark the model's output for training. transformers supports it, jinja2 does not."""
TEMPLATE_S = 10.0
TEMPLATE_CHARACTERS = 2**27
"""Default limits of a chat template: seconds, and characters of output."""

CONTEXT = 32  # preceding tokens that may affect the text of a token: a space, bytes of one character
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # text of bytes that are no character


class Text:
    """The tokenizer of a Hugging Face folder.

    Raises: ConfigError, from the constructor, if the folder has no tokenizer that can be read.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(
                f"`{path}` cannot be read: {error}\n"
                "hint: give token ids instead of text, or make tokenizer.json with transformers' save_pretrained"
            ) from error
        self.settings = _read_json(folder / "tokenizer_config.json")
        self.chat_template = _template(folder, self.settings)
        """Source of the chat template; None if the folder has none."""
        self._template: jinja2.Template | None = None
        self._dropped: frozenset[int] | None = None  # special tokens that are not decoded; None: all of them

    def keep(self, texts: Iterable[str]) -> None:
        """Decode special tokens with these texts from now on, such as those around the call of a tool."""
        added = self.tokenizer.get_added_tokens_decoder()
        special = {token: one.content for token, one in added.items() if one.special}
        kept = {token for token, text in special.items() if text in set(texts)}
        self._dropped = frozenset(special.keys() - kept) if kept else None

    def verbatim(self) -> Text:
        """Return a view of this tokenizer that decodes all special tokens."""
        view = copy.copy(self)
        view._dropped = frozenset()
        return view

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of a text; with `special`, also those that the tokenizer adds to every text."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def encode_pair(self, first: str, second: str, most: int | None = None) -> tuple[list[int], list[int]]:
        """Return the token ids of two texts in one prompt, with the tokenizer's marks, and the type of each token.

        Args:
            most: greatest number of tokens; the longer text is cut at its end until they fit. None: nothing is cut.
        """
        parts = [self.tokenizer.encode(text, add_special_tokens=False) for text in (first, second)]
        if most is not None:
            room = max(0, most - self.tokenizer.num_special_tokens_to_add(True))
            shorter, longer = sorted(parts, key=len)
            kept = min(len(shorter), room // 2) if len(shorter) + len(longer) > room else len(shorter)
            shorter.truncate(kept)
            longer.truncate(room - kept)
        found = self.tokenizer.post_process(parts[0], parts[1], True)
        return found.ids, found.type_ids

    def characters_max(self) -> int:
        """Return the most characters of text that one token of the vocabulary has."""
        return max(map(len, self.tokenizer.get_vocab(with_added_tokens=True)), default=1)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens except the kept ones."""
        if self._dropped is not None:
            ids = [token for token in ids if token not in self._dropped]
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=self._dropped is None)
        return text

    def stream(self, prompt_ids: Sequence[int]) -> Callable[[int], str]:
        """Return a function that decodes token by token after a prompt: it returns the text that a token completes.

        This is "" for a token that completes no character. Behind a prompt that ends inside a character, the first text
        is that of prompt and answer together, without what it has in common with the text of the prompt.
        """
        dropped, skip = self._dropped or frozenset(), self._dropped is None
        recent = [token for token in prompt_ids[-CONTEXT:] if token >= 0 and token not in dropped]
        stream = DecodeStream(ids=list(recent), skip_special_tokens=skip)
        unfinished = self._unfinished(recent, skip)

        def step(token: int) -> str:
            nonlocal stream, unfinished
            if token in dropped:
                return ""
            before = list(recent)
            recent.append(token)
            del recent[:-CONTEXT]
            try:
                piece = stream.step(self.tokenizer, token) or ""
            except Exception:  # the library's only error: bytes that began a character do not complete one
                stream = DecodeStream(ids=list(recent), skip_special_tokens=skip)
                unfinished = self._unfinished(recent, skip)
                return self.decode([*before, token])[len(self.decode(before)) :]
            if piece and unfinished:  # the stream has had no text yet, so the piece begins with that of `recent`
                equal = itertools.takewhile(bool, map(str.__eq__, piece, unfinished))
                piece, unfinished = piece[sum(equal) :], ""
            return piece

        return step

    def _unfinished(self, recent: Sequence[int], skip: bool) -> str:
        """Return the text of tokens that end inside a character; "": they do not."""
        if not recent or not self.tokenizer.decode(recent[-1:], skip_special_tokens=skip).endswith(INCOMPLETE):
            return ""
        text = self.tokenizer.decode(list(recent), skip_special_tokens=skip)
        return text if text.endswith(INCOMPLETE) else ""

    def chat(
        self,
        messages: Sequence[Message],
        *,
        now: Callable[[], time.struct_time] = time.localtime,
        seconds: float = TEMPLATE_S,
        characters_max: int = TEMPLATE_CHARACTERS,
        **more: Any,
    ) -> str:
        """Return a conversation as text in the form of the model's template, up to the start of the answer.

        Args:
            messages: {"role": ..., "content": ...} each.
            now: the local time for `strftime_now`.
            seconds, characters_max: limits of the template's running time and output.
            more: other variables of the template, e.g. tools.
        Raises: ConfigError if the folder has no template, or if the template refuses the conversation or exceeds a
            limit.
        """
        if self.chat_template is None:
            raise ConfigError("this model's folder has no chat template\nhint: give a prompt instead of messages")
        given = {"add_generation_prompt": True, "tools": None, "documents": None} | self.special_tokens() | more
        budget = Budget(seconds, characters_max)
        try:
            if self._template is None:
                self._template = _compiled(self.chat_template)
            given["strftime_now"] = lambda format_: time.strftime(format_, now())
            written = []
            copies = [dict(message) for message in messages]
            for part in self._template.generate(**{**given, "messages": copies, BUDGET: budget}):
                budget.write(len(part))
                written.append(part)
            return "".join(written)
        except Exception as error:  # a template is untrusted code and may raise anything
            raise ConfigError(f"the chat template refuses the conversation: {error}") from error

    def special_tokens(self) -> dict[str, str]:
        """Return special tokens by their names in templates: `bos_token`, `eos_token`, ..."""
        found = {}
        for name, value in self.settings.items():
            if name.endswith("_token"):
                text = value.get("content") if isinstance(value, dict) else value
                if isinstance(text, str):
                    found[name] = text
        return found


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if the file does not exist. Raises ConfigError."""
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
    """Return the chat template from its own file or from tokenizer_config.json, of several the one named default."""
    path = folder / "chat_template.jinja"
    template = path.read_text("utf-8") if path.is_file() else settings.get("chat_template")
    if isinstance(template, list):
        template = next((one["template"] for one in template if one.get("name") == "default"), None)
    if not isinstance(template, str):
        return None
    return GENERATION.sub(lambda tag: f"{tag[1]}{'endif' if tag[2] else 'if true'}{tag[3]}", template)


# ------------------------------------------------------------------------------------------------------ chat templates

BUDGET = "budget of lockstep"
"""The variable with the budget. A template cannot contain a name with spaces."""


class Budget:
    """Time and output that one rendering of a template has left."""

    def __init__(self, seconds: float, characters: int) -> None:
        self._seconds, self._characters = seconds, characters
        self._ends_s = time.monotonic() + seconds
        self._written = 0

    def spend(self) -> None:
        """Raise jinja2.TemplateError when the time is up."""
        if time.monotonic() > self._ends_s:
            raise jinja2.TemplateError(f"it takes longer than {self._seconds:g} s")

    def write(self, characters: int) -> None:
        """Count characters of output. Raise jinja2.TemplateError when they exceed the limit, or the time is up."""
        self._written += characters
        if self._written > self._characters:
            raise jinja2.TemplateError(f"it writes more than {self._characters} characters")
        self.spend()

    def turns(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the items of a loop. Raise jinja2.TemplateError when the time is up."""
        for item in items:
            self.spend()
            yield item


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, in which calls and operators of a template count against its budget."""

    intercepted_binops = frozenset(("*", "**", "%", "+"))

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function that the sandbox allows, if there is time left."""
        context[BUDGET].spend()
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator. Raise jinja2.TemplateError for a result that may be too large."""
        context[BUDGET].spend()
        sized = [value for value in (left, right) if hasattr(value, "__len__")]
        if operator == "+" and sum(map(len, sized)) > LARGEST:
            raise jinja2.TemplateError("the result of `+` is too large")
        if operator == "*" and sized and len(sized[0]) * (left if sized[0] is right else right) > LARGEST:
            raise jinja2.TemplateError("the result of `*` is too large")
        if operator == "**" and max(abs(left), abs(right)) > 1000:
            raise jinja2.TemplateError("the result of `**` is too large")
        if operator == "%" and isinstance(left, str):
            _check_widths(left)
        return super().call_binop(context, operator, left, right)


LARGEST = 2**24
"""Most characters or items in the result of one operation of a template."""

WIDE = re.compile(r"%[^a-zA-Z%]*(?:\d{4}|\*)")
"""A number format with a width of four digits or more, or a variable one."""


def _check_widths(written: str) -> None:
    if WIDE.search(written):
        raise jinja2.TemplateError("a width in `%` is too large")


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    """Apply jinja2's `format`, without large widths."""
    _check_widths(str(value))
    return jinja2.filters.do_format(value, *args, **kwargs)


def _center(value: str, width: int = 80) -> str:
    """Apply jinja2's `center`, with a width of at most 1000."""
    return jinja2.filters.do_center(value, min(width, 1000))


def _joined(text: str) -> str:
    """Check the result of `~`."""
    if len(text) > LARGEST:
        raise jinja2.TemplateError("the result of `~` is too large")
    return text


@jinja2.pass_context
def _turns(context: jinja2.runtime.Context, items: Iterable[Any]) -> Iterator[Any]:
    budget: Budget = context[BUDGET]
    return budget.turns(items)


def _compiled(source: str) -> jinja2.Template:
    """Return a template in which loops and `~` count against the budget."""
    environment = _environment()
    tree = environment.parse(source)
    for loop in tree.find_all(jinja2.nodes.For):
        loop.iter = jinja2.nodes.Filter(loop.iter, TURNS, [], [], None, None, lineno=loop.lineno)
    _bound_joins(tree)
    return environment.from_string(tree)


def _bound_joins(node: jinja2.nodes.Node) -> None:
    """Wrap every `~` below a node in the filter that checks its result."""
    for name in node.fields:
        value = getattr(node, name)
        bounded = [_bounded_join(one) for one in (value if isinstance(value, list) else [value])]
        setattr(node, name, bounded if isinstance(value, list) else bounded[0])


def _bounded_join(value: Any) -> Any:
    if not isinstance(value, jinja2.nodes.Node):
        return value
    _bound_joins(value)
    if not isinstance(value, jinja2.nodes.Concat):
        return value
    return jinja2.nodes.Filter(value, JOINED, [], [], None, None, lineno=value.lineno)


TURNS, JOINED = "lockstep_turns", "lockstep_joined"


def _environment() -> BoundedEnvironment:
    """Return an environment with the names that templates of Hugging Face folders expect, and no others."""
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = tojson
    environment.filters |= {TURNS: _turns, JOINED: _joined, "format": _format, "center": _center}
    return environment
