"""Data of any supported type as a table of columns."""

from __future__ import annotations

import operator
import reprlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast, get_args

import numpy as np

from hf_stitch.data.columns import Modality, common_kind, content, feature_kind, fields_of, is_list_of_numbers, kind_of

if TYPE_CHECKING:
    import datasets
    import torch


SAMPLE, LABEL = "samples", "label"
"""Names of the columns of samples that are not dictionaries."""

KNOWN = (*get_args(Modality), "integer")
"""Kinds of values that can be samples or labels."""

Id = int | str
Value = int | float | tuple[int | float, ...]
"""A label: a class, a number, or several numbers."""

CHUNK = 1000
"""Number of samples read at a time to compute a fingerprint."""


class Table(ABC):
    """A table of columns."""

    kinds: Mapping[str, str]
    """Kind of each column: a modality, ``class``, ``integer``, or the name of another type."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def column(self, name: str) -> list[Any]:
        """Return all values of a column of labels or ids."""

    @abstractmethod
    def read(self, name: str, positions: Sequence[int]) -> list[Any]:
        """Return the raw samples at some positions."""

    def classes(self, name: str) -> tuple[str, ...] | None:
        """Return the class names of a column of class labels; ``None`` for other columns."""
        return None

    def contents(self, name: str, positions: Sequence[int]) -> Iterable[bytes]:
        """Return the bytes that identify the raw samples at some positions."""
        return map(content, self.read(name, positions))


class Stored(Table):
    """The columns of a ``datasets.Dataset``."""

    def __init__(self, dataset: datasets.Dataset) -> None:
        if dataset.format["type"] == "custom":
            raise ValueError("the data set has a transform, which raw samples miss; apply it by map, or reset_format()")
        self.dataset = dataset.with_format(None)
        self.kinds = {name: feature_kind(feature) for name, feature in dataset.features.items()}

    def __len__(self) -> int:
        return len(self.dataset)

    def column(self, name: str) -> list[Any]:
        """Return all values of a column."""
        return list(self.dataset.select_columns([name])[:][name])

    def classes(self, name: str) -> tuple[str, ...] | None:
        """Return the class names of a column of class labels; ``None`` for other columns."""
        return tuple(self.dataset.features[name].names) if self.kinds[name] == "class" else None

    def read(self, name: str, positions: Sequence[int]) -> list[Any]:
        """Return the values of a column at some positions."""
        return list(self.dataset.select_columns([name])[list(positions)][name])

    def contents(self, name: str, positions: Sequence[int]) -> Iterable[bytes]:
        """Return the values at some positions as bytes, for the fingerprint."""
        if self.kinds[name] != "image":
            return super().contents(name, positions)
        from datasets.table import embed_table_storage

        # Hash files instead of pixels, which may differ between versions of a decoder; files given by path are read.
        files = embed_table_storage(self.dataset.select_columns([name]).with_format("arrow")[positions])
        return ((file["bytes"] if file else None) or b"" for file in files[name].to_pylist())


class Listed(Table):
    """Columns in memory: lists, arrays or tensors."""

    def __init__(self, columns: Mapping[str, Sequence[Any]]) -> None:
        self.columns = columns
        self.kinds = {name: common_kind(values) for name, values in columns.items()}

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def column(self, name: str) -> list[Any]:
        """Return all values of a column."""
        return list(self.columns[name])

    def read(self, name: str, positions: Sequence[int]) -> list[Any]:
        """Return the values of a column at some positions."""
        return [self.columns[name][position] for position in positions]


@dataclass(frozen=True, eq=False)
class Source:
    """The complete data, in its original order; :class:`Samples` are positions in it."""

    table: Table
    modality: Modality
    columns: tuple[str, ...]
    ids: Sequence[Id]
    labels: list[int | None] | None
    label_names: tuple[str, ...] | None
    unread: str = ""
    """Why the labels that the data have cannot be read as classes; empty if they can, or there are none."""
    values: list[Value | None] | None = None
    """Labels that are no classes: a number, or several, of each sample."""
    undecided: bool = False
    """Whether the reason is that several columns could be the labels."""
    numbers: tuple[int, ...] | None = None
    """The number of the class of each label, if labels are numbered in another order than that of the data."""

    @cached_property
    def num_classes(self) -> int | None:
        """The number of classes; ``None`` without labels."""
        if self.labels is None:
            return None
        if self.label_names is not None:
            return len(self.label_names)
        return 1 + max((label for label in self.labels if label is not None and label >= 0), default=-1)

    def read(self, positions: Sequence[int]) -> list[Any]:
        """Raw samples, as pairs if there are two columns; of an image and a text, as dictionaries."""
        columns = [self.table.read(name, positions) for name in self.columns]
        if self.modality == "image and text":
            return [dict(zip(fields_of(self.columns), row, strict=True)) for row in zip(*columns, strict=True)]
        return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))

    def contents(self, positions: Sequence[int]) -> Iterator[tuple[bytes, ...]]:
        """The bytes that identify each sample, column by column."""
        return zip(*(self.table.contents(name, positions) for name in self.columns), strict=True)


def as_table(data: Any) -> Table:
    """Convert data of any supported type to a table."""
    import datasets
    import torch

    if isinstance(data, datasets.IterableDataset):
        data = download(data)
    if isinstance(data, datasets.Dataset):
        return Stored(data)
    if isinstance(data, torch.utils.data.DataLoader):
        return as_table(dataset_of(data))
    if isinstance(data, torch.utils.data.TensorDataset):
        return Listed(columns_of(data))
    if isinstance(data, torch.utils.data.Dataset):
        return Mapped(data)
    if not len(data):
        raise ValueError("there are no samples: the data is empty")
    if isinstance(data, (np.ndarray, torch.Tensor)):
        return Listed({SAMPLE: cast(Sequence[Any], data)})
    rows = [as_row(item) for item in data]
    for place, row in enumerate(rows):
        if set(row) != set(rows[0]):
            raise ValueError(_unlike(place, data))
    return Listed({name: [row[name] for row in rows] for name in rows[0]})


def _unlike(place: int, data: Sequence[Any]) -> str:
    """The message for a sample whose columns differ from those of the first one."""
    first = data[0]
    if isinstance(first, Mapping):
        return f"sample {place} must be a dictionary with the keys of sample 0: {', '.join(first)}"
    wanted = "a pair of a sample and its label" if LABEL in as_row(first) else f"a {kind_of(first)}"
    return f"sample {place} must be {wanted}, as sample 0, got {type(data[place]).__name__}"


def download(stream: datasets.IterableDataset) -> datasets.Dataset:
    """Read a complete stream into memory; images stay encoded."""
    from datasets import Dataset, concatenate_datasets
    from datasets.table import table_cast

    tables = stream.with_format("arrow").iter(batch_size=CHUNK)
    if stream.features is not None:  # datasets 3 forgets them when a stream is shuffled or cut
        tables = (table_cast(table, stream.features.arrow_schema) for table in tables)
    parts = [Dataset(table) for table in tables]
    if not parts:
        raise ValueError("there are no samples: the stream is empty")
    return concatenate_datasets(parts)


def values_of(table: Table, role: str, given: str | Iterable[Any]) -> list[Any]:
    """A column given by name, or given values, one per sample."""
    if isinstance(given, str):
        return table.column(given)
    values = list(given.tolist() if hasattr(given, "tolist") else given)
    if len(values) != len(table):
        raise ValueError(f"{role} must have one value for each of {len(table)} samples, got {len(values)}")
    return values


def as_label(value: Any, id_: Id) -> int | None:
    """Check a label and return it as an integer, also ``1.0``; ``None`` for a sample without one."""
    try:
        whole = isinstance(value, (float, np.floating)) and value.is_integer()
        label = None if value is None else int(value if whole else operator.index(value))
    except TypeError as error:
        raise TypeError(f"labels must be integers, got {reprlib.repr(value)} for sample {id_!r}") from error
    if label is not None and label >= 2**31:
        raise ValueError(f"labels must be numbers of classes, below 2**31, got {label} for sample {id_!r}")
    return label


def as_value(value: Any, id_: Id) -> Value | None:
    """Check a label that is no class: a number, or several, of which whole ones stay whole."""
    found = value.tolist() if hasattr(value, "tolist") else value
    several = isinstance(found, list | tuple)
    numbers = tuple(found) if isinstance(found, list | tuple) else (found,)
    wrong = not numbers or not all(isinstance(number, int | float) for number in numbers)
    if found is not None and wrong:
        raise TypeError(f"labels must be numbers, or lists of numbers, got {reprlib.repr(value)} for sample {id_!r}")
    numbers = tuple(int(number) if isinstance(number, bool) else number for number in numbers)
    return None if found is None else numbers if several else numbers[0]


def as_ids(values: Iterable[Any]) -> list[Id]:
    """Check ids and return them as integers or strings."""
    ids: list[Id] = []
    for value in values:
        try:
            ids.append(value if isinstance(value, str) else operator.index(value))
        except TypeError as error:
            raise TypeError(f"ids must be integers or texts, got {value!r} at place {len(ids)}") from error
    twice = [id_ for id_, count in Counter(ids).items() if count > 1]
    if twice:
        raise ValueError(f"ids must be unique, but {twice[0]!r} occurs {ids.count(twice[0])} times")
    return ids


def as_row(item: Any) -> dict[str, Any]:
    """Return the columns of one item: a dictionary, a sample, or a pair of a sample and its label."""
    if isinstance(item, Mapping):
        return dict(item)
    if isinstance(item, (tuple, list)) and kind_of(item) != "text":
        if len(item) == 2 and kind_of(item[0]) in get_args(Modality):
            sample, label = item
            several = getattr(sample, "ndim", 2) > 1 and is_list_of_numbers(label)  # else both may be inputs
            if several or kind_of(label) in ("integer", "float"):
                return {SAMPLE: sample, LABEL: operator.index(label) if kind_of(label) == "integer" else label}
        if len(item) == 1:
            return {SAMPLE: item[0]}
    return {SAMPLE: item}


class Mapped(Table):
    """The columns of a map-style ``torch.utils.data.Dataset``, whose items are read when they are needed.

    Items are read once at the start, for their types and labels.
    """

    def __init__(self, dataset: Any) -> None:
        import torch

        if isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__len__"):
            raise TypeError(
                f"{type(dataset).__name__} has no items by number, and its order may change: pass a list of its items "
                "(list(dataset)), or a map-style data set"
            )
        self.dataset = dataset
        self.kinds: dict[str, str] = {}
        self._integers: dict[str, list[Any]] = {}
        if not len(self):
            raise ValueError("there are no samples: the data is empty")
        self._check_repeats()
        for place in range(len(self)):
            self._examine(place, as_row(dataset[place]))

    def _check_repeats(self) -> None:
        """Check that items do not differ when they are read again, because two networks must get the same samples."""

        def read(place: int) -> dict[str, bytes]:  # other objects are neither samples nor labels, and have no content
            row = as_row(self.dataset[place])
            return {name: content(value) for name, value in row.items() if kind_of(value) in KNOWN}

        for place in {0, len(self) // 2, len(self) - 1}:
            if read(place) != read(place):
                raise ValueError(
                    f"item {place} of {type(self.dataset).__name__} differs when it is read again: both networks must "
                    "get the same samples, so leave out random transforms (augmentation), or pass a list of its items"
                )

    def _examine(self, place: int, row: Mapping[str, Any]) -> None:
        kinds = {name: kind_of(value) for name, value in row.items()}
        self.kinds = self.kinds or kinds
        if kinds != self.kinds:
            raise ValueError(f"item {place} of the data set has {_listed(kinds)}, but item 0 has {_listed(self.kinds)}")
        for name, kind in kinds.items():
            if kind == "integer":
                self._integers.setdefault(name, []).append(row[name])

    def __len__(self) -> int:
        return len(self.dataset)

    def column(self, name: str) -> list[Any]:
        """Return all values of a column."""
        return self._integers[name] if name in self._integers else self.read(name, range(len(self)))

    def classes(self, name: str) -> tuple[str, ...] | None:
        """Return the class names of torchvision's data sets (attribute ``classes``); ``None`` for others."""
        names = getattr(self.dataset, "classes", None)
        known = name == LABEL and isinstance(names, (list, tuple)) and all(isinstance(each, str) for each in names)
        return tuple(names) if known and names else None

    def read(self, name: str, positions: Sequence[int]) -> list[Any]:
        """Return the values of a column at some positions."""
        return [as_row(self.dataset[position])[name] for position in positions]


def _listed(kinds: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in kinds.items())


def columns_of(dataset: torch.utils.data.TensorDataset) -> dict[str, Sequence[Any]]:
    """Return the columns of a ``TensorDataset``: samples, and the labels if it has two tensors."""
    samples: Any
    samples, *others = dataset.tensors
    if not others:
        return {SAMPLE: samples}
    labels = others[0]
    if len(others) > 1 or not (labels.dim() == 1 or 2 == labels.dim() < samples.dim()):
        shapes = ", ".join(f"{tuple(each.shape)} {str(each.dtype).removeprefix('torch.')}" for each in dataset.tensors)
        raise ValueError(
            "a TensorDataset must contain samples, or samples and labels of shape (n,), for samples of several axes "
            f"also (n, outputs), got {shapes}: pass Samples.of(samples, label=labels)"
        )
    return {SAMPLE: samples, LABEL: labels.tolist()}


def dataset_of(loader: torch.utils.data.DataLoader[Any]) -> Any:
    """Return the data set of a loader that reads it in order.

    The loader itself is not iterated: samples are read from its data set, so that its batch size, workers and
    ``drop_last`` do not matter.
    """
    import torch
    from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

    sampler, batches = loader.sampler, loader.batch_sampler
    remedy = "pass its data set, loader.dataset"
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        raise ValueError(f"the data set of the loader has no items by number: {remedy}, as a list of its items")
    if isinstance(sampler, RandomSampler):
        raise ValueError(f"the loader shuffles, so that its order is not that of its data set: {remedy}")
    if not isinstance(sampler, SequentialSampler) or not (batches is None or type(batches) is BatchSampler):
        other = sampler if not isinstance(sampler, SequentialSampler) else batches
        raise ValueError(
            f"the order of the loader is that of {type(other).__name__}, which cannot be checked: {remedy}, or a "
            "torch.utils.data.Subset with the samples in your order"
        )
    own = torch.utils.data.default_collate, torch.utils.data._utils.collate.default_convert
    if loader.collate_fn not in own:
        raise ValueError(
            "the loader collates items by a function of its own, which a single sample does not pass through: "
            f"{remedy}, of which each network preprocesses the samples itself"
        )
    return loader.dataset
