"""The evaluation transform of timm as an image processor of transformers that is saved and loaded with a model."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import BaseImageProcessor, BatchFeature

from hf_stitch.adapters.preprocess import converted


class TimmImageProcessor(BaseImageProcessor):
    """Resize, crop and normalise images with the transform of timm, with identical pixel values.

    Images are first converted to the number of channels of the model (1: grey, 3: RGB): 16-bit grey values are scaled
    to 8 bit, and transparent images are put on white. The ``TimmWrapperImageProcessor`` of transformers applies the
    same transform, but reads the ``config.json`` of a timm model and cannot be saved.
    """

    model_input_names = ["pixel_values"]  # noqa: RUF012 - declared like this in transformers

    def __init__(
        self, input_size: tuple[int, int, int] = (3, 224, 224), interpolation: str = "bicubic",
        mean: tuple[float, ...] = (0.485, 0.456, 0.406), std: tuple[float, ...] = (0.229, 0.224, 0.225),
        crop_pct: float = 0.875, crop_mode: str = "center", **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(**kwargs)
        self.input_size, self.interpolation = tuple(input_size), interpolation
        self.mean, self.std = (_of_channels(values, input_size[0]) for values in (mean, std))
        self.crop_pct, self.crop_mode = crop_pct, crop_mode

    @property
    def size(self) -> dict[str, int]:
        """Height and width of the output, with the keys of processors of transformers."""
        return {"height": self.input_size[1], "width": self.input_size[2]}

    def data_config(self) -> dict[str, Any]:
        """Return the config of the transform, as arguments of ``timm.data.create_transform``."""
        keys = ("input_size", "interpolation", "mean", "std", "crop_pct", "crop_mode")
        return {key: getattr(self, key) for key in keys}

    def to_dict(self) -> dict[str, Any]:
        """Return the config and the class name as JSON values."""
        values = {key: list(v) if isinstance(v, tuple) else v for key, v in self.data_config().items()}
        return {**values, "image_processor_type": type(self).__name__}

    def preprocess(self, images: Any, return_tensors: str | None = None, **kwargs: Any) -> BatchFeature:
        """Apply the transform to images."""
        import timm.data

        if kwargs:
            raise TypeError(
                f"{type(self).__name__} applies the transform of timm and does not accept {next(iter(kwargs))!r}"
            )
        if self.input_size[0] not in (1, 3):
            raise ValueError(
                f"the model requires {self.input_size[0]} channels, but images have 1 (grey) or 3 (RGB): pass "
                "processor=, a function from one sample to one tensor, to hf_stitch.load, or pass preprocessed tensors"
            )
        is_batch = isinstance(images, (list, tuple)) or getattr(images, "ndim", 0) == 4
        image_list = list(images) if is_batch else [images]
        transform = timm.data.create_transform(**self.data_config(), is_training=False)
        pixels = [transform(image) for image in converted(list(map(_as_image, image_list)), self.input_size[0])]
        if return_tensors is None:
            return BatchFeature({"pixel_values": pixels})
        return BatchFeature({"pixel_values": torch.stack(pixels).numpy()}, tensor_type=return_tensors)


def _of_channels(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    """Return the mean or std of each channel, averaged if the number of channels differs from training."""
    return tuple(values) if len(values) == channels else (fmean(values),) * channels


def _as_image(image: Any) -> Image.Image:
    if isinstance(image, Image.Image):
        return image
    if isinstance(image, Tensor):
        image = image.permute(1, 2, 0).numpy()
    array = np.asarray(image)
    array = array.squeeze(-1) if array.ndim == 3 and array.shape[-1] == 1 else array
    if array.dtype != np.uint8:
        raise ValueError(
            f"{TimmImageProcessor.__name__} requires images, or arrays or tensors of uint8, got {array.dtype}: "
            "pass preprocessed tensors directly to the model"
        )
    return Image.fromarray(array)
