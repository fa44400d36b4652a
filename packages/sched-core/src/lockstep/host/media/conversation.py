"""Messages with images: their parts for the chat template, and the URLs in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.core.contract.errors import ConfigError
from lockstep.host.media.content import MediaPrompt
from lockstep.host.media.images import decode_image
from lockstep.host.media.processor import MediaError, MediaProcessor
from lockstep.host.media.source import MediaLimits, read_image


def image_url(part: Mapping[str, Any]) -> str | None:
    """Return the URL of a part of type image_url: a text, or an object with `url`. None: it has none."""
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, Mapping) else given
    return url if isinstance(url, str) else None


def with_images(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return messages as chat templates of such models expect them, and the URLs of their images in order."""
    shown, urls = [], list[str]()
    for message in messages:
        content = message.get("content")
        if not isinstance(content, list):
            shown.append(dict(message))
            continue
        parts = []
        for part in content:
            if part.get("type") == "image_url":
                if (url := image_url(part)) is None:
                    raise MediaError("an image has no `image_url.url`", len(urls))
                urls.append(url)
                parts.append({"type": "image"})
            else:
                parts.append(dict(part))
        shown.append({**message, "content": parts})
    return shown, urls


def check_count(urls: Sequence[str], limits: MediaLimits) -> None:
    """Raise MediaError for too many images."""
    if len(urls) > limits.images:
        raise MediaError(f"the request has {len(urls)} images, at most {limits.images} are allowed (images_max)")


def prompt_with(processor: MediaProcessor, text: str, urls: Sequence[str], limits: MediaLimits) -> MediaPrompt:
    """Return a rendered conversation with its images. Raises MediaError."""
    check_count(urls, limits)
    images = []
    for number, url in enumerate(urls):
        try:
            images.append(decode_image(read_image(url, limits), limits))
        except MediaError as error:
            raise MediaError(error.message, number) from None
    return processor.prompt(text, images)


def as_config_error(error: MediaError) -> ConfigError:
    """Return an error of media for a caller in this process."""
    where = "" if error.where is None else f" (image {error.where})"
    return ConfigError(f"{error.message}{where}")
