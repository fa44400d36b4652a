"""The pixels of an image, by Pillow, within limits.

The number of pixels is in the header of every format, and is checked before anything is decoded. Only formats are tried
that models are given in practice: others have had most of the faults of decoders.
"""

from __future__ import annotations

import io
import warnings
from typing import Any

from lockstep.host.media.processor import MediaError
from lockstep.host.media.source import MediaLimits

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def decode_image(raw: bytes, limits: MediaLimits) -> Any:
    """Return an image in RGB, turned by its EXIF orientation; of an animation the first frame. Raises MediaError."""
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow about many pixels, whose own limit is another one
            with Image.open(io.BytesIO(raw), formats=FORMATS) as opened:
                width, height = opened.size
                if width * height > limits.image_pixels:
                    raise MediaError(
                        f"the image has {width:,} x {height:,} pixels, at most {limits.image_pixels:,} are allowed "
                        "(image_pixels_max)"
                    )
                turned = ImageOps.exif_transpose(opened)
                if "transparency" in turned.info or turned.mode in ("RGBA", "LA", "PA"):
                    behind = Image.new("RGBA", turned.size, (255, 255, 255, 255))
                    behind.alpha_composite(turned.convert("RGBA"))
                    turned = behind
                return turned.convert("RGB")
    except MediaError:
        raise
    except Exception as error:  # Pillow raises many types for broken files
        why = "it is none of " + ", ".join(FORMATS) if type(error).__name__ == "UnidentifiedImageError" else str(error)
        raise MediaError(f"the image cannot be decoded: {why[:200]}") from None
