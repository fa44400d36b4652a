"""The media of an engine as its options and its ranks require them, for the assembly of a rank."""

from __future__ import annotations

from lockstep.core.contract.errors import ConfigError
from lockstep.runtime.media import DeviceMedia
from lockstep.runtime.media_share import EncoderShare
from lockstep.runtime.models.language_model import LanguageModel
from lockstep.runtime.overlap import StreamLane


def media_of(model: LanguageModel, lane: StreamLane, rows: int) -> DeviceMedia | None:
    """Return the media of an engine; None: its model takes neither media nor given embeddings."""
    if model.media_encoder is None and not model.embedding_size:
        return None
    return DeviceMedia(model.media_encoder, lane, rows)


def divide_contents(media: DeviceMedia | None, model: LanguageModel, lane: StreamLane, *, on: bool) -> None:
    """Let the ranks of an engine divide contents, if there are several. Data-parallel ranks have contents of their own.

    Args:
        on: the option `encoder_data_parallel`.
    Raises: ConfigError if it is off, and there is no encoder.
    """
    parallel = model.parallel
    if media is None or model.media_encoder is None:
        if not on:
            raise ConfigError(
                f"`encoder_data_parallel` is off, but {model.settings.architecture} here has no encoder of media\n"
                "hint: leave it out"
            )
    elif on and parallel.ranks > 1 and parallel.shared is None:
        media.share = EncoderShare(parallel, lane, model.settings.hidden, model.dtype)
