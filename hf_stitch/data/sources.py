"""Datasets from the Hub, from folders, and from registered sources."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from PIL.Image import fromarray

from hf_stitch.data.samples import Samples
from hf_stitch.hub import explained
from hf_stitch.reference import looks_local
from hf_stitch.registry import registries
from hf_stitch.storage.files import decoding, reading

if TYPE_CHECKING:
    import datasets


class DataSource(ABC):
    """Reader of datasets of one format, service or library: :func:`read_data` calls it for ``name:place``.

    A source is registered in ``hf_stitch.registries.data``, by a plugin with an entry point in ``hf_stitch.data``. All
    commands with ``--data`` then accept ``name:place``. The datasets must have a column of images or of texts, and may
    have a column of labels; set the features ``Image``, ``Value("string")`` and ``ClassLabel``, so that
    :meth:`hf_stitch.Samples.of` detects these columns.

    Attributes:
        name: Name in the registry.

    Example:
        >>> import datasets
        >>> class Lines(DataSource):
        ...     name = "lines"
        ...
        ...     def splits(self, place):
        ...         return {"all": datasets.Dataset.from_dict({"text": ["one", "two"]})}
        >>> Lines().splits("poem")["all"]["text"][1]
        'two'
    """

    name: ClassVar[str]

    @abstractmethod
    def splits(self, place: str) -> Mapping[str, datasets.Dataset]:
        """Read the splits of a dataset by name, each in a fixed order.

        Args:
            place: The part after ``name:``, for example a path or the name of a dataset.

        Raises:
            FileNotFoundError: If the dataset does not exist.
        """


def read_data(source: str, data_dir: str | Path | None = None, split: str | None = None) -> datasets.Dataset:
    """Load one split of a dataset, from the Hub, from a folder, or from a registered source.

    Args:
        source: A Hub id ``owner/name`` or ``owner/name/config``; a folder with one data file per split, for example
            ``train.parquet`` and ``test.parquet``, or with one subfolder of images per class (below ``train`` and
            ``test`` for several splits); or ``name:place`` for a source in ``hf_stitch.registries.data``, for example
            ``sklearn:digits``: the 1797 images of handwritten digits, 8x8 pixels, that scikit-learn includes, 1438 for
            training and 359 for testing.
        data_dir: Folder with local copies of datasets from the Hub. The Hub's ``owner/name/config`` is then read from
            ``<data_dir>/name/config`` without access to the Hub.
        split: Name of the split; for the Hub and for folders also a slice (``"train[:1000]"``). Optional for datasets
            with a single split.

    Raises:
        FileNotFoundError: The dataset does not exist.
        PermissionError: It is gated, or the token may not read it.
        ConnectionError: The Hub is not available.

    Example:
        >>> from hf_stitch import Samples
        >>> Samples.of(read_data("sklearn:digits", split="test"))
        Samples(359 x image, 10 classes)
    """
    from datasets import Dataset

    source_name, colon, place = source.partition(":")
    if colon and not Path(source).expanduser().exists():
        return _pick_split(registries.data.build(source_name).splits(place), source, split)
    if Path(source).expanduser().is_file():
        raise ValueError(
            f"{source} is a file; pass its folder, with one file per split (train.parquet, test.parquet, …), or one "
            "subfolder of images per class"
        )
    if looks_local(source) and not Path(source).expanduser().is_dir():
        raise FileNotFoundError(f"no folder {source!r}; a dataset on the Hub is 'owner/name' or 'owner/name/config'")
    if Path(source).expanduser().is_dir():
        arguments = [str(Path(source).expanduser())]
    elif data_dir is not None:
        arguments = [str(Path(data_dir).expanduser().joinpath(*source.split("/")[1:] or [source]))]
    else:
        owner, name, config = (*source.split("/", 2), None, None)[:3]
        arguments = [part for part in (f"{owner}/{name}" if name else owner, config) if part]
    is_local = data_dir is not None or Path(arguments[0]).is_dir()
    files = Path(arguments[0]).rglob("*") if is_local else ()
    with decoding(arguments[0]), reading(files):
        dataset = _load(source, arguments, split)
    return dataset if isinstance(dataset, Dataset) else _pick_split(dataset, source, split)


def _load(source: str, arguments: Sequence[str], split: str | None) -> Any:
    from datasets import load_dataset

    try:
        return load_dataset(*arguments, split=split)
    except OSError as error:
        failure = f"cannot read the dataset {'/'.join(arguments)}"
        explanation = explained(failure, error)
        if isinstance(explanation, (PermissionError, ConnectionError)):
            raise explanation from error
        raise FileNotFoundError(
            f"{failure}: {error}. Check its name, or set data_dir to a folder that contains "
            f"{source.split('/')[-1]}/<split>.parquet"
        ) from error


def _pick_split(splits: Mapping[str, datasets.Dataset], source: str, split: str | None) -> datasets.Dataset:
    if split is None and len(splits) == 1:
        return next(iter(splits.values()))
    if split is None or split not in splits:
        problem = "requires a split" if split is None else f"does not have a split {split!r}"
        raise ValueError(f"{source} {problem}; the splits are: {', '.join(splits)}")
    return splits[split]


class ScikitLearn(DataSource):
    """Datasets of scikit-learn: handwritten digits of 8x8 pixels (sklearn:digits).

    Example:
        >>> {name: len(split) for name, split in ScikitLearn().splits("digits").items()}
        {'train': 1438, 'test': 359}
    """

    name: ClassVar[str] = "sklearn"

    def splits(self, place: str) -> Mapping[str, datasets.Dataset]:
        """Return the digits, with their 17 grey values scaled to 0 to 255."""
        if place != "digits":
            raise ValueError(f"the only dataset of scikit-learn is sklearn:digits, got sklearn:{place}")
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
