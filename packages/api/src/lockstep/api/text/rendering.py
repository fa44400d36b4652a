"""A conversation as text by the chat template of the model, and as tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from lockstep.api.text.plain_text import Texts
from lockstep.core.contract.errors import ConfigError
from lockstep.host.media.content import MediaPrompt
from lockstep.host.media.conversation import check_count, prompt_with
from lockstep.host.media.conversation import with_media as split_media
from lockstep.host.media.kinds import PARTS
from lockstep.host.media.processor import MediaError, MediaProcessor
from lockstep.host.media.source import MediaLimits


class RenderingError(Exception):
    """A conversation that cannot be rendered.

    Args:
        field: the client's field that is at fault.
    """

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.message, self.field = message, field


def characters_of(message: Mapping[str, Any]) -> int:
    """Return the characters of a message's texts: its fields, the parts of its content, the arguments of its calls."""
    content, found = message.get("content"), sum(len(one) for one in message.values() if isinstance(one, str))
    for part in content if isinstance(content, list) else ():
        text = part.get("text")
        found += len(text) if isinstance(text, str) else 0
    for call in message.get("tool_calls") or ():
        function = call.get("function")
        arguments = function.get("arguments") if isinstance(function, dict) else None
        found += len(arguments) if isinstance(arguments, str) else 0
    return found


class NamedMedium(NamedTuple):
    """A medium of messages: its kind, and the client's name of it."""

    kind: str
    name: str


def media_of(messages: Sequence[Mapping[str, Any]], field: str) -> tuple[NamedMedium, ...]:
    """Return the media in messages, in order."""
    return tuple(
        NamedMedium(PARTS[part["type"]], f"{field}.{i}.content.{j}.{part['type']}")
        for i, message in enumerate(messages)
        if isinstance(message.get("content"), list)
        for j, part in enumerate(message["content"])
        if _is_medium(part)
    )


def _is_medium(part: Mapping[str, Any]) -> bool:
    return isinstance(kind := part.get("type"), str) and kind in PARTS


class MediaReader(Protocol):
    """What media need: the processor of the model, and limits. `lockstep.api.processes.text_process` has one."""

    limits: MediaLimits

    def processor(self) -> MediaProcessor:
        """Return the processor. Raises RenderingError if it cannot be made."""


class Conversation(msgspec.Struct, frozen=True):
    """A conversation, as its client sent it.

    Args:
        messages: as of OpenAI's API.
        variables: further variables of the template.
        field: the client's name of the messages, for errors.
        go_on: the last message is incomplete, and the text ends with it.
        nothing: content of a message with calls or thoughts and without content.
        media: the client's name of each medium, in order, for errors.
    """

    messages: list[dict[str, Any]]
    variables: dict[str, Any]
    field: str
    go_on: bool = False
    nothing: str | None = None
    media: tuple[str, ...] = ()

    def rendered(self, text: Texts) -> tuple[str, list[int]]:
        """Return the text of the conversation, and its token ids. Raises RenderingError."""
        written = self._written(text, [self._message(one, i) for i, one in enumerate(self.messages)])
        return written, text.encode(written, special=False)

    def with_media(self, text: Texts, reader: MediaReader) -> MediaPrompt:
        """Return the conversation with its media. Raises RenderingError."""
        messages = [self._message(one, i, media=True) for i, one in enumerate(self.messages)]
        try:
            shown, found = split_media(messages)
            check_count([one.kind for one in found], reader.limits)
            return prompt_with(reader.processor(), self._written(text, shown), found, reader.limits)
        except MediaError as error:
            where = self.field if error.where is None else self.media[error.where]
            raise RenderingError(f"`{where}`: {error.message}", where) from error

    def _written(self, text: Texts, messages: list[dict[str, Any]]) -> str:
        """Return the conversation as text. Raises RenderingError."""
        try:
            written = text.chat(messages, **self.variables)
        except ConfigError as error:
            raise RenderingError(str(error).partition("\nhint: ")[0], "messages") from error
        if self.go_on:
            last = str(messages[-1].get("content") or "").rstrip()
            at = written.rfind(last)
            if at < 0:
                message = "`continue_final_message`: the chat template changes the last message"
                raise RenderingError(message, "continue_final_message")
            written = written[: at + len(last)]
        return written

    def _message(self, given: dict[str, Any], index: int, *, media: bool = False) -> dict[str, Any]:
        """Return a message for the template: content as text, arguments of tool calls as objects.

        Args:
            media: content that has any remains a list of parts.
        """
        result = dict(given)
        content = given.get("content")
        if content is None:
            if given["role"] != "assistant" or not (given.get("tool_calls") or "reasoning_content" in given):
                where = f"{self.field}.{index}.content"
                raise RenderingError(f"`{where}` is missing", where)
            result["content"] = self.nothing
        if isinstance(content, list):
            parts, mixed = [], media and any(map(_is_medium, content))
            for i, part in enumerate(content):
                if mixed and _is_medium(part):
                    continue
                if part.get("type") != "text" or not isinstance(part.get("text"), str):
                    where = f"messages.{index}.content.{i}.type"
                    raise RenderingError(f"`{where}` must be text, got {str(part.get('type'))[:40]!r}", where)
                parts.append(part["text"])
            result["content"] = content if mixed else "\n".join(parts)
        calls = []
        for call in given.get("tool_calls") or ():
            function = call.get("function")
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                try:
                    call = {**call, "function": {**function, "arguments": json.loads(function["arguments"] or "{}")}}
                except (ValueError, RecursionError):
                    where = f"messages.{index}.tool_calls"
                    raise RenderingError(f"`{where}` has arguments that are not JSON", where) from None
            calls.append(call)
        if calls:
            result["tool_calls"] = calls
        return result
