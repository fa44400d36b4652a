"""Messages with media: their parts for the chat template, and the URLs in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lockstep.core.contract.errors import ConfigError
from lockstep.host.media.audio import decode_audio
from lockstep.host.media.content import MediaPrompt
from lockstep.host.media.images import decode_image
from lockstep.host.media.kinds import KINDS, PARTS, Kind
from lockstep.host.media.processor import MediaError, MediaProcessor
from lockstep.host.media.source import MediaLimits, read_media
from lockstep.host.media.video import decode_video

INPUT_AUDIO = "input_audio"
AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg")


class MediaUrl(NamedTuple):
    """A medium of a conversation: its kind, and where its bytes are."""

    kind: Kind
    url: str


def media_url(part: Mapping[str, Any]) -> MediaUrl | None:
    """Return the medium of a part; None: the part is none.

    A URL is a text, or an object with `url`. `input_audio` is an object with base64 in `data`, and a `format`.
    Raises: MediaError.
    """
    name = part.get("type")
    if not isinstance(name, str) or name not in PARTS:
        return None
    kind, given = KINDS[PARTS[name]], part.get(name)
    if name == INPUT_AUDIO:
        data, form = (given.get("data"), given.get("format")) if isinstance(given, Mapping) else (None, None)
        if not isinstance(data, str):
            raise MediaError("an audio clip has no `input_audio.data`, its bytes as base64")
        if form not in AUDIO_FORMATS:
            raise MediaError(f"`input_audio.format` must be one of {', '.join(AUDIO_FORMATS)}, got `{str(form)[:40]}`")
        return MediaUrl(kind.name, f"data:audio/{form};base64,{data}")
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str):
        raise MediaError(f"{kind.one} has no `{name}.url`")
    return MediaUrl(kind.name, url)


def with_media(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[MediaUrl]]:
    """Return messages as chat templates of such models expect them, and their media in order. Raises MediaError."""
    shown, found = [], list[MediaUrl]()
    for message in messages:
        content = message.get("content")
        if not isinstance(content, list):
            shown.append(dict(message))
            continue
        parts = []
        for part in content:
            try:
                one = media_url(part)
            except MediaError as error:
                raise MediaError(error.message, len(found)) from None
            if one is None:
                parts.append(dict(part))
            else:
                found.append(one)
                parts.append({"type": one.kind})
        shown.append({**message, "content": parts})
    return shown, found


def check_count(kinds: Sequence[str], limits: MediaLimits) -> None:
    """Raise MediaError for too many media of a kind."""
    for name, kind in KINDS.items():
        if (count := sum(one == name for one in kinds)) > (most := limits.most(name)):
            raise MediaError(f"the request has {count} {kind.several}, at most {most} are allowed ({name}s_max)")


def prompt_with(processor: MediaProcessor, text: str, media: Sequence[MediaUrl], limits: MediaLimits) -> MediaPrompt:
    """Return a rendered conversation with its media. Raises MediaError."""
    check_count([one.kind for one in media], limits)
    read = list[tuple[Kind, Any]]()
    for number, one in enumerate(media):
        try:
            processor.check(one.kind)
            read.append((one.kind, _decoded(processor, one, limits)))
        except MediaError as error:
            raise MediaError(error.message, number) from None
    return processor.prompt(text, read)


def _decoded(processor: MediaProcessor, one: MediaUrl, limits: MediaLimits) -> Any:
    """Return the pixels of an image, the samples of an audio clip, or the frames of a video. Raises MediaError."""
    raw = read_media(one.kind, one.url, limits)
    if one.kind == "audio":
        return decode_audio(raw, processor.sampling_rate, limits)
    if one.kind == "video":
        return decode_video(raw, processor.sampling(limits.video_frames), limits)
    return decode_image(raw, limits)


def as_config_error(error: MediaError) -> ConfigError:
    """Return an error of media for a caller in this process."""
    where = "" if error.where is None else f" (medium {error.where})"
    return ConfigError(f"{error.message}{where}")
