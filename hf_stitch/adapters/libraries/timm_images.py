"""timm's evaluation transform as an image processor of transformers, which is saved beside a model and loaded again."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import BaseImageProcessor, BatchFeature


class TimmImageProcessor(BaseImageProcessor):
    """Resizes, crops and normalises images by timm's own transform, so that every pixel is what timm makes of it.

    Images are first converted to as many channels as the model takes (1: grey, else RGB). transformers'
    ``TimmWrapperImageProcessor`` does the same, but reads the ``config.json`` of a timm model, and cannot be saved.

    Args:
        input_size: Channels, height and width that the model takes.
        interpolation: Of the resampling: ``bicubic``, ``bilinear``, …
        mean: By channel, subtracted from values in [0, 1].
        std: By channel; the rest is divided by it.
        crop_pct: Share of the resized image that is kept.
        crop_mode: ``center``, ``squash`` or ``border``, as timm defines them.
        **kwargs: What transformers adds to a saved processor.

    Example:
        >>> processor = TimmImageProcessor((3, 32, 32), crop_pct=1.0)
        >>> processor(Image.new("L", (50, 40)), return_tensors="pt")["pixel_values"].shape
        torch.Size([1, 3, 32, 32])
    """

    model_input_names = ["pixel_values"]  # noqa: RUF012 - as transformers declares it

    def __init__(
        self,
        input_size: tuple[int, int, int] = (3, 224, 224),
        interpolation: str = "bicubic",
        mean: tuple[float, ...] = (0.485, 0.456, 0.406),
        std: tuple[float, ...] = (0.229, 0.224, 0.225),
        crop_pct: float = 0.875,
        crop_mode: str = "center",
        **kwargs: Any,
    ) -> None:
        """Keep the config as plain values."""
        super().__init__(**kwargs)
        self.input_size, self.interpolation = tuple(input_size), interpolation
        self.mean, self.std = tuple(mean), tuple(std)
        self.crop_pct, self.crop_mode = crop_pct, crop_mode

    @property
    def size(self) -> dict[str, int]:
        """Height and width of what comes out, as transformers' processors name them."""
        return {"height": self.input_size[1], "width": self.input_size[2]}

    def data_config(self) -> dict[str, Any]:
        """The config of the transform, as ``timm.data.create_transform`` takes it."""
        keys = ("input_size", "interpolation", "mean", "std", "crop_pct", "crop_mode")
        return {key: getattr(self, key) for key in keys}

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        values = {key: list(v) if isinstance(v, tuple) else v for key, v in self.data_config().items()}
        return {**values, "image_processor_type": type(self).__name__}

    def preprocess(self, images: Any, return_tensors: str | None = None, **kwargs: Any) -> BatchFeature:
        """Images as ``pixel_values``.

        Args:
            images: One or several (a list, or a batch in one array): PIL images, arrays (height, width[, channels]) of
                bytes, or tensors (channels, height, width) of bytes.
            return_tensors: ``"pt"`` or ``"np"`` stacks them; ``None`` gives a list of tensors.
            **kwargs: None known.

        Raises:
            ValueError: For values that are no bytes, or a model that takes neither 1 nor 3 channels.
            TypeError: For options that this transform does not have.
        """
        import timm.data

        if kwargs:
            raise TypeError(f"{type(self).__name__} has no option {next(iter(kwargs))!r}: its transform is timm's own")
        if self.input_size[0] not in (1, 3):
            raise ValueError(
                f"the model takes {self.input_size[0]} channels, and images give 1 (grey) or 3 (RGB): pass processor=, "
                "a function from one sample to one tensor, to hf_stitch.load, or give preprocessed tensors"
            )
        batch = isinstance(images, (list, tuple)) or getattr(images, "ndim", 0) == 4
        several = list(images) if batch else [images]
        transform = timm.data.create_transform(**self.data_config(), is_training=False)
        mode = "L" if self.input_size[0] == 1 else "RGB"
        pixels = [transform(_as_image(image).convert(mode)) for image in several]
        if return_tensors is None:
            return BatchFeature({"pixel_values": pixels})
        return BatchFeature({"pixel_values": torch.stack(pixels).numpy()}, tensor_type=return_tensors)


def _as_image(image: Any) -> Image.Image:
    if isinstance(image, Image.Image):
        return image
    if isinstance(image, Tensor):
        image = image.permute(1, 2, 0).numpy()
    array = np.asarray(image)
    array = array.squeeze(-1) if array.ndim == 3 and array.shape[-1] == 1 else array
    if array.dtype != np.uint8:
        raise ValueError(
            f"{TimmImageProcessor.__name__} takes images, or arrays and tensors of bytes (uint8); got {array.dtype}. "
            "Preprocessed tensors go to the model itself"
        )
    return Image.fromarray(array)
