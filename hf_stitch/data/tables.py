"""Uniform tables of columns for all supported types of data: datasets, lists, arrays, tensors and loaders."""

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
"""Column names for data without names: plain samples, or pairs of a sample and a label."""

KNOWN = (*get_args(Modality), "integer")
"""Kinds of values that can be samples or labels."""

Id = int | str
Value = int | float | tuple[int | float, ...]
"""A label: a class, a number, or several numbers."""

CHUNK = 1000
"""Number of samples read at a time to compute a fingerprint."""


class Table(ABC):
    """Base class of tables of columns."""

    kinds: Mapping[str, str]
    """Kind of each column: a modality, ``class``, ``integer``, or the name of another type."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def column(self, name: str) -> list[Any]:
        """Return all values of a column of labels or ids."""

    @abstractmethod
    def read(self, name: str, positions: Sequence[int]) -> list[Any]:
        """Return the raw samples at the positions."""

    def classes(self, name: str) -> tuple[str, ...] | None:
        """Return the class names of a column of class labels; ``None`` for other columns."""
        return None

    def contents(self, name: str, positions: Sequence[int]) -> Iterable[bytes]:
        """Return the bytes that identify the raw samples at the positions."""
        return map(content, self.read(name, positions))


class Stored(Table):
    """Table of the columns of a ``datasets.Dataset``."""

    def __init__(self, dataset: datasets.Dataset) -> None:
        if dataset.format["type"] == "custom":
            raise ValueError(
                "the dataset has a transform, which raw samples skip; apply it with map, or reset_format()"
            )
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
        """Return the values of a column at the positions."""
        return list(self.dataset.select_columns([name])[list(positions)][name])

    def contents(self, name: str, positions: Sequence[int]) -> Iterable[bytes]:
        """Return the values at the positions as bytes, for the fingerprint."""
        if self.kinds[name] != "image":
            return super().contents(name, positions)
        from datasets.table import embed_table_storage

        # Hash files instead of pixels, which may differ between versions of a decoder; read files given by path.
        files = embed_table_storage(self.dataset.select_columns([name]).with_format("arrow")[positions])
        return ((file["bytes"] if file else None) or b"" for file in files[name].to_pylist())


class Listed(Table):
    """Table of columns in memory: lists, arrays or tensors."""

    def __init__(self, columns: Mapping[str, Sequence[Any]]) -> None:
        self.columns = columns
        self.kinds = {name: common_kind(values) for name, values in columns.items()}

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def column(self, name: str) -> list[Any]:
        """Return all values of a column."""
        return list(self.columns[name])

    def read(self, name: str, positions: Sequence[int]) -> list[Any]:
        """Return the values of a column at the positions."""
        return [self.columns[name][position] for position in positions]


@dataclass(frozen=True, eq=False)
class Source:
    """Complete data in the original order; :class:`Samples` are positions in it."""

    table: Table
    modality: Modality
    columns: tuple[str, ...]
    ids: Sequence[Id]
    labels: list[int | None] | None
    label_names: tuple[str, ...] | None
    unread: str = ""
    """Reason why labels cannot be read as classes; empty if they can, and for unlabelled data."""
    values: list[Value | None] | None = None
    """Labels that are not classes: one or several numbers for each sample."""
    undecided: bool = False
    """Whether labels are unread because several columns could contain them."""
    numbers: tuple[int, ...] | None = None
    """Class number of each label of the data, if they were renumbered (:meth:`Samples.renumbered`)."""

    @cached_property
    def num_classes(self) -> int | None:
        """The number of classes; ``None`` without labels."""
        if self.labels is None:
            return None
        if self.label_names is not None:
            return len(self.label_names)
        return 1 + max((label for label in self.labels if label is not None and label >= 0), default=-1)

    def read(self, positions: Sequence[int]) -> list[Any]:
        """Return raw samples; two columns as pairs, image and text as dictionaries."""
        columns = [self.table.read(name, positions) for name in self.columns]
        if self.modality == "image and text":
            return [dict(zip(fields_of(self.columns), row, strict=True)) for row in zip(*columns, strict=True)]
        return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))

    def contents(self, positions: Sequence[int]) -> Iterator[tuple[bytes, ...]]:
        """Return the bytes that identify each sample, column by column."""
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
        raise ValueError("samples must not be empty: the data is empty")
    if isinstance(data, (np.ndarray, torch.Tensor)):
        return Listed({SAMPLE: cast(Sequence[Any], data)})
    rows = [as_row(item) for item in data]
    for index, row in enumerate(rows):
        if set(row) != set(rows[0]):
            raise ValueError(_mismatch(index, data))
    return Listed({name: [row[name] for row in rows] for name in rows[0]})


def _mismatch(index: int, data: Sequence[Any]) -> str:
    """Return the message for a sample with different columns than the first sample."""
    first = data[0]
    if isinstance(first, Mapping):
        return f"sample {index} must be a dictionary with the keys of sample 0: {', '.join(first)}"
    expected = "a pair of a sample and its label" if LABEL in as_row(first) else f"a {kind_of(first)}"
    return f"sample {index} must be {expected} like sample 0, got {type(data[index]).__name__}"


def download(stream: datasets.IterableDataset) -> datasets.Dataset:
    """Read a complete stream into memory; images stay encoded."""
    from datasets import Dataset, concatenate_datasets
    from datasets.table import table_cast

    tables = stream.with_format("arrow").iter(batch_size=CHUNK)
    if stream.features is not None:  # datasets 3 drops them for shuffled or truncated streams
        tables = (table_cast(table, stream.features.arrow_schema) for table in tables)
    parts = [Dataset(table) for table in tables]
    if not parts:
        raise ValueError("samples must not be empty: the stream is empty")
    return concatenate_datasets(parts)


def values_of(table: Table, role: str, column_or_values: str | Iterable[Any]) -> list[Any]:
    """Return a column by name, or passed values, one per sample."""
    if isinstance(column_or_values, str):
        return table.column(column_or_values)
    values = list(column_or_values.tolist() if hasattr(column_or_values, "tolist") else column_or_values)
    if len(values) != len(table):
        raise ValueError(f"{role} must have one value for each of {len(table)} samples, got {len(values)}")
    return values


def as_label(value: Any, id_: Id) -> int | None:
    """Check a label and return it as an integer, also ``1.0``; ``None`` for an unlabelled sample."""
    try:
        is_whole = isinstance(value, (float, np.floating)) and value.is_integer()
        label = None if value is None else int(value if is_whole else operator.index(value))
    except TypeError as error:
        raise TypeError(f"labels must be integers, got {reprlib.repr(value)} for sample {id_!r}") from error
    if label is not None and label >= 2**31:
        raise ValueError(f"labels must be class numbers below 2**31, got {label} for sample {id_!r}")
    return label


def as_value(value: Any, id_: Id) -> Value | None:
    """Check a label that is not a class: one or several numbers; integers stay integers."""
    plain = value.tolist() if hasattr(value, "tolist") else value
    is_list = isinstance(plain, list | tuple)
    numbers = tuple(plain) if isinstance(plain, list | tuple) else (plain,)
    is_invalid = not numbers or not all(isinstance(number, int | float) for number in numbers)
    if plain is not None and is_invalid:
        raise TypeError(f"labels must be numbers, or lists of numbers, got {reprlib.repr(value)} for sample {id_!r}")
    numbers = tuple(int(number) if isinstance(number, bool) else number for number in numbers)
    return None if plain is None else numbers if is_list else numbers[0]


def as_ids(values: Iterable[Any]) -> list[Id]:
    """Check ids and return them as integers or strings."""
    ids: list[Id] = []
    for value in values:
        try:
            ids.append(value if isinstance(value, str) else operator.index(value))
        except TypeError as error:
            raise TypeError(f"ids must be integers or texts, got {value!r} at place {len(ids)}") from error
    repeated = [id_ for id_, count in Counter(ids).items() if count > 1]
    if repeated:
        raise ValueError(f"ids must be unique, but {repeated[0]!r} occurs {ids.count(repeated[0])} times")
    return ids


def as_row(item: Any) -> dict[str, Any]:
    """Return the columns of one item: a dictionary, a sample, or a pair of a sample and its label."""
    if isinstance(item, Mapping):
        return dict(item)
    if isinstance(item, (tuple, list)) and kind_of(item) != "text":
        if len(item) == 2 and kind_of(item[0]) in get_args(Modality):
            sample, label = item
            is_multi_label = getattr(sample, "ndim", 2) > 1 and is_list_of_numbers(label)  # else both may be inputs
            if is_multi_label or kind_of(label) in ("integer", "float"):
                return {SAMPLE: sample, LABEL: operator.index(label) if kind_of(label) == "integer" else label}
        if len(item) == 1:
            return {SAMPLE: item[0]}
    return {SAMPLE: item}


class Mapped(Table):
    """Table of the columns of a map-style ``torch.utils.data.Dataset``, with items read on demand.

    Items are read once at the start, for their types and labels.
    """

    def __init__(self, dataset: Any) -> None:
        import torch

        if isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__len__"):
            raise TypeError(
                f"{type(dataset).__name__} is not a map-style dataset, and its order may change; pass a list of its "
                "items (list(dataset)), or a map-style dataset"
            )
        self.dataset = dataset
        self.kinds: dict[str, str] = {}
        self._integers: dict[str, list[Any]] = {}
        if not len(self):
            raise ValueError("samples must not be empty: the data is empty")
        self._check_repeats()
        for index in range(len(self)):
            self._examine(index, as_row(dataset[index]))

    def _check_repeats(self) -> None:
        """Raise an error if items differ when read again, because two networks must receive the same samples."""

        def read(index: int) -> dict[str, bytes]:  # values of other kinds are neither samples nor labels
            row = as_row(self.dataset[index])
            return {name: content(value) for name, value in row.items() if kind_of(value) in KNOWN}

        for index in {0, len(self) // 2, len(self) - 1}:
            if read(index) != read(index):
                raise ValueError(
                    f"item {index} of {type(self.dataset).__name__} differs when it is read again, but both networks "
                    "must receive the same samples; remove random transforms (augmentation), or pass a list"
                )

    def _examine(self, index: int, row: Mapping[str, Any]) -> None:
        kinds = {name: kind_of(value) for name, value in row.items()}
        self.kinds = self.kinds or kinds
        if kinds != self.kinds:
            raise ValueError(f"item {index} of the dataset has {_listed(kinds)}, but item 0 has {_listed(self.kinds)}")
        for name, kind in kinds.items():
            if kind == "integer":
                self._integers.setdefault(name, []).append(row[name])

    def __len__(self) -> int:
        return len(self.dataset)

    def column(self, name: str) -> list[Any]:
        """Return all values of a column."""
        return self._integers[name] if name in self._integers else self.read(name, range(len(self)))

    def classes(self, name: str) -> tuple[str, ...] | None:
        """Return the class names of torchvision datasets (attribute ``classes``); ``None`` for other datasets."""
        names = getattr(self.dataset, "classes", None)
        are_names = name == LABEL and isinstance(names, (list, tuple)) and all(isinstance(n, str) for n in names)
        return tuple(names) if are_names and names else None

    def read(self, name: str, positions: Sequence[int]) -> list[Any]:
        """Return the values of a column at the positions."""
        return [as_row(self.dataset[position])[name] for position in positions]


def _listed(kinds: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in kinds.items())


def columns_of(dataset: torch.utils.data.TensorDataset) -> dict[str, Sequence[Any]]:
    """Return the columns of a ``TensorDataset``: samples, and labels from a second tensor."""
    samples: Any
    samples, *rest = dataset.tensors
    if not rest:
        return {SAMPLE: samples}
    labels = rest[0]
    if len(rest) > 1 or not (labels.dim() == 1 or 2 == labels.dim() < samples.dim()):
        shapes = ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in dataset.tensors)
        raise ValueError(
            "a TensorDataset must contain samples, or samples and labels of shape (n,), for samples of several axes "
            f"also (n, outputs), got {shapes}; pass Samples.of(samples, label=labels)"
        )
    return {SAMPLE: samples, LABEL: labels.tolist()}


def dataset_of(loader: torch.utils.data.DataLoader[Any]) -> Any:
    """Return the dataset of a loader that reads it in order.

    Samples are read from its dataset, not from the loader, so that its batch size, workers and ``drop_last`` do not
    matter.
    """
    import torch
    from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

    sampler, batches = loader.sampler, loader.batch_sampler
    remedy = "pass loader.dataset"
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        raise ValueError(f"the dataset of the loader is not map-style; {remedy} as a list of its items")
    if isinstance(sampler, RandomSampler):
        raise ValueError(f"the loader shuffles, so its order differs from its dataset; {remedy}")
    if not isinstance(sampler, SequentialSampler) or not (batches is None or type(batches) is BatchSampler):
        custom = sampler if not isinstance(sampler, SequentialSampler) else batches
        raise ValueError(
            f"the order of {type(custom).__name__} cannot be checked; {remedy}, or a torch.utils.data.Subset with the "
            "samples in your order"
        )
    standard = torch.utils.data.default_collate, torch.utils.data._utils.collate.default_convert
    if loader.collate_fn not in standard:
        raise ValueError(
            f"the loader has a custom collate_fn, which single samples would skip; {remedy}: each network applies its "
            "own preprocessing"
        )
    return loader.dataset
