"""The bytes by which a sample in memory is recognised."""

from __future__ import annotations

from typing import Any

from PIL.Image import Image

from hf_stitch.data.columns import kind_of


def content(sample: Any) -> bytes:
    """Return the bytes that identify a sample in memory."""
    if isinstance(sample, Image):
        return repr((sample.mode, sample.size, sample.getpalette())).encode() + sample.tobytes()
    if kind_of(sample) == "tensor":
        import torch

        tensor = torch.as_tensor(sample).detach().cpu().contiguous()
        values: bytes = tensor.flatten().view(torch.uint8).numpy().tobytes()
        return repr((str(tensor.dtype), tuple(tensor.shape))).encode() + values
    return repr(sample).encode()
