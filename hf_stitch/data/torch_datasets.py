"""Data sets and loaders of PyTorch as tables of columns."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from hf_stitch.data.columns import Modality, content, kind_of

if TYPE_CHECKING:
    import torch

SAMPLE, LABEL = "samples", "label"
"""Names of the columns of samples that are not dictionaries."""

KNOWN = (*get_args(Modality), "integer")
"""Kinds of values that can be samples or labels."""


def as_row(item: Any) -> dict[str, Any]:
    """Return the columns of one item: a dictionary, a sample, or a pair of a sample and its label."""
    if isinstance(item, Mapping):
        return dict(item)
    if isinstance(item, (tuple, list)) and kind_of(item) != "text":
        if len(item) == 2 and kind_of(item[0]) in get_args(Modality) and kind_of(item[1]) in ("integer", "float"):
            label = item[1]
            return {SAMPLE: item[0], LABEL: operator.index(label) if kind_of(label) == "integer" else label}
        if len(item) == 1:
            return {SAMPLE: item[0]}
    return {SAMPLE: item}


class Mapped:
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

    def contents(self, name: str, positions: Sequence[int]) -> Iterable[bytes]:
        """Return the values at some positions as bytes, for the fingerprint."""
        return map(content, self.read(name, positions))


def _listed(kinds: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in kinds.items())


def columns_of(dataset: torch.utils.data.TensorDataset) -> dict[str, Sequence[Any]]:
    """Return the columns of a ``TensorDataset``: samples, and the labels if it has two tensors."""
    samples: Any
    samples, *others = dataset.tensors
    if not others:
        return {SAMPLE: samples}
    labels = others[0]
    if len(others) > 1 or labels.dim() != 1:
        shapes = ", ".join(f"{tuple(each.shape)} {str(each.dtype).removeprefix('torch.')}" for each in dataset.tensors)
        raise ValueError(
            f"a TensorDataset must contain samples, or samples and labels of shape (n,), got {shapes}: pass "
            "Samples.of(samples, label=labels)"
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
