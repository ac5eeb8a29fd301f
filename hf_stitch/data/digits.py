"""Data sets that scikit-learn includes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from PIL.Image import fromarray

from hf_stitch.data.samples import Samples
from hf_stitch.data.sources import DataSource

if TYPE_CHECKING:
    import datasets


class ScikitLearn(DataSource):
    """Data sets that scikit-learn includes: handwritten digits of 8x8 pixels (sklearn:digits).

    Example:
        >>> {name: len(split) for name, split in ScikitLearn().splits("digits").items()}
        {'train': 1438, 'test': 359}
    """

    name: ClassVar[str] = "sklearn"

    def splits(self, place: str) -> Mapping[str, datasets.Dataset]:
        """Return the digits, with their 17 grey values scaled to 0 to 255."""
        if place != "digits":
            raise ValueError(f"hf-stitch reads one data set of scikit-learn, sklearn:digits, got sklearn:{place}")
        return _digits()


@cache
def _digits() -> dict[str, datasets.Dataset]:
    import datasets
    from sklearn.datasets import load_digits

    images, target = load_digits(return_X_y=True)
    pixels = np.rint(images.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    train, test = Samples.of(pixels, label=target).split(0.2, seed=0)
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=[str(d) for d in range(10)]))
    return {
        name: datasets.Dataset.from_dict(
            {"image": [fromarray(pixels[id_]) for id_ in part.ids], "label": part.labels}, features=features
        )
        for name, part in (("train", train), ("test", test))
    }
