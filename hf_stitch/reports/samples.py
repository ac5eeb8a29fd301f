"""Samples on a page: images as pictures, texts as texts."""

from __future__ import annotations

import base64
import io
import warnings
from typing import Any

import numpy as np
import torch

from hf_stitch.reports.section import Picture

SIDE, LENGTH = 160, 600
"""Longest side of a picture in pixels, and characters of a text."""


def picture(caption: str, sample: Any) -> Picture:
    """Show a sample."""
    if sample is None:
        return Picture(caption, "", "(not kept)")
    if isinstance(sample, str):
        return Picture(caption, "", sample if len(sample) <= LENGTH else f"{sample[:LENGTH]} …")
    if isinstance(sample, (torch.Tensor, np.ndarray)):
        values = torch.as_tensor(sample).detach().float().cpu()
        if values.ndim == 3 and values.shape[0] in (1, 3) and values.min() >= 0 and values.max() <= 1:
            from PIL import Image

            pixels = (values.expand(3, -1, -1).permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()
            return Picture(caption, address(Image.fromarray(pixels)), caption)
        return Picture(caption, "", f"{type(sample).__name__} of shape {tuple(values.shape)}")
    if hasattr(sample, "thumbnail"):  # a PIL image
        return Picture(caption, address(sample), caption)
    return Picture(caption, "", type(sample).__name__)


def address(image: Any, side: int = SIDE) -> str:
    """Return a PIL image as a PNG in a ``data:`` address."""
    small = image.convert("RGB")
    small.thumbnail((side, side))
    return png(small.save)


def png(save: Any) -> str:
    """Return what a function writes as PNG to a file as a ``data:`` address."""
    file = io.BytesIO()
    with warnings.catch_warnings():  # no font has control characters, and the warning contains them
        warnings.filterwarnings("ignore", r"Glyph (\d|[12]\d|3[01]|12[7-9]|1[34]\d|15\d) ")
        save(file, format="png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
