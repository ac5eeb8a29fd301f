"""Conversion of images of any mode to grey or RGB, before the processor of a network."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

from hf_stitch.data.samples import ids_of
from hf_stitch.printing import warn

UNBOUNDED = ("I", "F")
"""Modes whose range of values is unknown."""


def converted(images: Sequence[Any], channels: int) -> list[Any]:
    """Convert PIL images to the mode that a network takes.

    16-bit grey values are scaled by their range: 65535 becomes 255, whatever the largest value in the image.
    Transparent images are put on white, with one warning per process. All other modes are converted as Pillow does.
    """
    mode = "L" if channels == 1 else "RGB"
    for id_, image in zip(ids_of(images), images, strict=True):
        dtype = getattr(image, "dtype", None)
        if getattr(dtype, "kind", "f") not in "biuf" or getattr(dtype, "is_complex", False):
            raise ValueError(f"image {id_!r} has {dtype} values, and those of an image are real: convert it to bytes")
        what = ""
        if isinstance(image, Image.Image) and image.mode in UNBOUNDED:
            what = f"mode {image.mode!r}"
        elif isinstance(image, np.ndarray) and image.dtype.kind in "iu" and image.size and image.max() > 255:
            what = f"integers up to {image.max()}"
        if what:
            raise ValueError(
                f"image {id_!r} has {what}, whose range is unknown: scale it to bytes yourself, for example "
                "Image.fromarray((np.asarray(image) / highest * 255).astype('uint8')), where highest is the largest "
                "value that a pixel can have"
            )
    return [_opaque(image).convert(mode) if isinstance(image, Image.Image) else image for image in images]


def _opaque(image: Image.Image) -> Image.Image:
    """Return an image without transparency and with 8 bits per channel."""
    if image.mode.startswith("I;16"):
        return Image.fromarray(((np.asarray(image).astype(np.uint32) + 128) // 257).astype(np.uint8))
    if not image.has_transparency_data:
        return image
    layers = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
    if layers.getchannel("A").getextrema() == (255, 255):
        return layers.convert("RGB")
    _warn_of_transparency()
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), layers).convert("RGB")


@cache
def _warn_of_transparency() -> None:
    warn("some images are transparent and are put on white: put them on another background yourself if it matters")
