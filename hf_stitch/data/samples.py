"""Raw samples in a fixed order, shared by both networks: :class:`Samples`.

Samples are not preprocessed. A batch contains images, texts or tensors as in the data, and each network applies its own
preprocessing, so that networks with different processors receive the same samples.
"""

from __future__ import annotations

import dataclasses
import hashlib
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Annotated, Any

import numpy as np

from hf_stitch.data.columns import NUMERIC, Modality, check_named, find_labels, find_samples, no_classes, unread_labels
from hf_stitch.data.tables import CHUNK, Id, Source, Value, as_ids, as_label, as_table, as_value, values_of
from hf_stitch.options import Constraint, Count, Natural, Within, check, checked
from hf_stitch.printing import progress_bar, see, warn

Share = Annotated[float, Within(0, 1, above=True)]


class RawSamples(list[Any]):
    """Raw samples of a batch, with their ids."""

    def __init__(self, samples: Iterable[Any], ids: Sequence[Id]) -> None:
        super().__init__(samples)
        self.ids = ids


def ids_of(samples: Sequence[Any]) -> Sequence[Id]:
    """Return the ids of raw samples for error messages: their own ids, or their positions in the list."""
    return samples.ids if isinstance(samples, RawSamples) else range(len(samples))


def missing_in(sample: Any, modality: str) -> str | None:
    """Return the name of a missing part (None) of a sample, or ``None`` for a complete sample."""
    if isinstance(sample, dict):
        return next((name for name, value in sample.items() if value is None), None)
    return (
        modality if sample is None or (isinstance(sample, (tuple, list)) and any(v is None for v in sample)) else None
    )


@dataclass(frozen=True)
class Batch:
    """Consecutive samples, read into memory.

    Attributes:
        samples: Images, texts, pairs of texts, tensors or arrays, as in the data; dictionaries of image and text.
        origin: The corresponding part of the :class:`Samples`.

    Example:
        >>> batch = next(Samples.of(["good", "bad", "fine"]).batches(2))
        >>> batch.samples, batch.ids
        (['good', 'bad'], (0, 1))
    """

    samples: list[Any]
    origin: Samples

    @property
    def ids(self) -> tuple[Id, ...]:
        """The ids of the samples."""
        return self.origin.ids

    @property
    def labels(self) -> list[int] | None:
        """The labels of the samples, checked as in :attr:`Samples.labels`."""
        return self.origin.labels

    @property
    def label_values(self) -> list[Value] | None:
        """The labels of the samples, as in :attr:`Samples.label_values`."""
        return self.origin.label_values


class Samples:
    """Raw samples in a fixed order, each with an id and, if the data has labels, a label.

    Create samples with :meth:`of`. Subsets (:meth:`select`, :meth:`take`, :meth:`split`) share the data and keep ids
    and labels.

    Args:
        source: The complete data.
        positions: Positions of the samples in the data.

    Example:
        >>> samples = Samples.of(["good", "bad", "fine", "poor"], label=[1, 0, 1, 0])
        >>> samples
        Samples(4 x text, 2 classes)
        >>> train, test = samples.split(0.5, seed=0)
        >>> sorted(train.ids + test.ids), sorted(test.labels)
        ([0, 1, 2, 3], [0, 1])
        >>> [batch.samples for batch in samples.batches(3)]
        [['good', 'bad', 'fine'], ['poor']]
    """

    def __init__(self, source: Source, positions: Sequence[int]) -> None:
        if not len(positions):
            raise ValueError("samples must not be empty: the data or the requested part is empty")
        self._source = source
        self._positions = positions

    @classmethod
    def of(
        cls, data: Any, *, image: str | None = None, text: str | None = None, text_pair: str | None = None,
        label: str | Iterable[Any] | None = None, id: str | Iterable[Any] | None = None,
    ) -> Samples:  # fmt: skip
        """Create samples from data of any supported type, and detect the columns of samples and labels.

        Samples stay raw: each network applies its own preprocessing. Tensors count as preprocessed.

        Columns are detected by type: images by the feature ``Image``, texts by ``string``, labels by ``ClassLabel`` or
        otherwise by the name ``label`` or ``labels``, else ``target``, with numbers or lists of numbers. Integers (also
        ``1.0``) are classes, for tasks with classes; other numbers are labels for regression, and lists are labels for
        several outputs, classes or words. Labels of another kind raise an error when they are read. The first
        dictionary determines the columns of dictionaries. A column of images and a column of texts together make
        samples ``{"image": …, "text": …}``, and each network reads its own part. A further column of texts with the
        name ``answer`` contains the expected answers about images, ``{"image": …, "text": …, "answer": …}``.

        Args:
            data: A ``datasets.Dataset``; a ``datasets.IterableDataset``, which is read completely into memory once
                (images stay encoded; limit it with ``data.take(n)``); a list, tuple or ``datasets.Column`` of PIL
                images, texts, pairs of texts, arrays or tensors, of pairs of one of these and its label, or of
                dictionaries of these; an array or a tensor with samples along the first axis; a ``TensorDataset`` of
                samples, or of samples and labels; any other map-style ``torch.utils.data.Dataset`` of such items (they
                are read once for types and labels, and again when needed); a ``DataLoader`` without shuffling or a
                custom ``collate_fn``, to read its dataset; or :class:`Samples`, which are returned unchanged.
            image: Column of the images, or of lists of images.
            text: Column of the texts; with ``image``, of the texts of the images.
            text_pair: Column of the second texts, if a sample is a pair of texts. Requires ``text``.
            label: Column of the labels, or the labels: a number for each sample, or a list of numbers.
            id: Column of the ids, or the ids: unique integers or texts. Default: positions in ``data``, which cannot
                reveal that two sides (``paired_data``) are in different orders.
        """
        check(Data, data=data)
        if isinstance(data, Samples):
            if any(value is not None for value in (image, text, text_pair, label, id)):
                raise ValueError("data is already a Samples object, so its columns cannot be chosen again")
            return data
        table = as_table(data)
        named_columns = [name for name in (image, text, text_pair, label, id) if isinstance(name, str)]
        if isinstance(label, str):
            kinds = {name: kind.partition(", but ")[0] for name, kind in table.kinds.items()}  # some may lack a label
            check_named(kinds, "label", label, NUMERIC)
        if isinstance(id, str):
            check_named(table.kinds, "id", id, ("integer", "text"))
        modality, columns = find_samples(table.kinds, image, text, text_pair, taken=named_columns)
        label_columns = [] if label is not None else find_labels(table.kinds, taken=[*named_columns, *columns])
        unread = unread_labels(table.kinds, label_columns)
        if label_columns and not unread:
            label = label_columns[0]
        ids = range(len(table)) if id is None else as_ids(values_of(table, "id", id))
        labels: list[int | None] | None = None
        values: list[Value | None] | None = None
        passed_labels = None if label is None else values_of(table, "label", label)
        try:
            labels = None if passed_labels is None else list(map(as_label, passed_labels, ids))
        except TypeError as error:  # matters only where classes are read
            unread = no_classes(label if isinstance(label, str) else "", f"other values ({error})")
            try:
                values = list(map(as_value, passed_labels or (), ids))
            except TypeError:
                if not label_columns:
                    raise
        names = table.classes(label) if isinstance(label, str) else None
        source = Source(table, modality, columns, ids, labels, names, unread, values, undecided=len(label_columns) > 1)
        return cls(source, range(len(table)))

    def __len__(self) -> int:
        return len(self._positions)

    def __repr__(self) -> str:
        """Return for example ``Samples(10000 x image, 10 classes)``."""
        classes = "" if self.num_classes is None else f", {self.num_classes} classes"
        return f"Samples({len(self)} x {self.modality}{classes})"

    @property
    def modality(self) -> Modality:
        """Type of a sample: ``image``, ``text`` (a text or a pair of texts), ``tensor`` or ``image and text``."""
        return self._source.modality

    @cached_property
    def ids(self) -> tuple[Id, ...]:
        """The id of every sample, in order."""
        return tuple(self._source.ids[p] for p in self._positions)

    @cached_property
    def labels(self) -> list[int] | None:
        """The label of every sample, in order; None for unlabelled data."""
        if self._source.unread:
            raise ValueError(self._source.unread)
        if self._source.labels is None:
            return None
        labels, numbers = [], self._source.numbers or range(self.num_classes or 0)
        for id_, position in zip(self.ids, self._positions, strict=True):
            label = self._source.labels[position]
            if label is None or not 0 <= label < len(numbers):
                raise ValueError(
                    f"sample {id_!r} has the label {label}, which is not one of the {len(numbers)} classes; drop "
                    "unlabelled samples with select, or the column of labels if all samples are unlabelled"
                )
            labels.append(numbers[label])
        return labels

    @cached_property
    def label_values(self) -> list[Value] | None:
        """The unconverted label of every sample, in order: a class or one or several numbers; None without labels."""
        if self._source.numbers is not None or (self._source.unread and self._source.values is None):
            labels = self.labels  # of classes, or an error with the reason
            return None if labels is None else [*labels]
        stored = self._source.labels if self._source.values is None else self._source.values
        if stored is None:
            return None
        values = [stored[position] for position in self._positions]
        for id_, value in zip(self.ids, values, strict=True):
            if value is None or not np.isfinite(value).all():
                raise ValueError(f"sample {id_!r} has the label {value}; drop unlabelled samples with select")
        return [value for value in values if value is not None]

    @property
    def is_labelled(self) -> bool:
        """Whether the data have labels of any kind, including kinds that :attr:`labels` cannot read."""
        return self._source.labels is not None or bool(self._source.unread)

    @property
    def undecided(self) -> str:
        """The columns that could contain the labels, and how to choose one; empty if the column is known."""
        return self._source.unread if self._source.undecided else ""

    def unlabelled(self) -> Samples:
        """Return the same samples without labels."""
        no_labels: dict[str, Any] = {"labels": None, "label_names": None, "values": None}
        no_labels |= {"numbers": None, "unread": "", "undecided": False}
        return Samples(dataclasses.replace(self._source, **no_labels), self._positions)

    @property
    def label_names(self) -> tuple[str, ...] | None:
        """Class names, if the data have them."""
        return self._source.label_names

    @property
    def num_classes(self) -> int | None:
        """Number of classes of the complete data, including unselected samples; None for unlabelled data.

        Without class names, it is the largest label plus one.
        """
        return self._source.num_classes

    @cached_property
    def fingerprint(self) -> str:
        """Hash of id, label and content of every sample, in order: ``"sha256:…"``.

        The content of an image in a dataset is its encoded file, so the same pixels in another format have a different
        hash. For other images, the content is mode, size and pixels; for arrays and tensors, dtype, shape and values.
        All data are read once.
        """
        digest = hashlib.sha256(self.modality.encode())
        labels: Sequence[Any] | None = self._source.labels if self._source.values is None else self._source.values
        for start in range(0, len(self), CHUNK):
            positions = self._positions[start : start + CHUNK]
            for position, contents in zip(positions, self._source.contents(positions), strict=True):
                label = None if labels is None else labels[position]
                digest.update(repr((self._source.ids[position], label, *map(len, contents))).encode())
                for content in contents:
                    digest.update(content)
        return f"sha256:{digest.hexdigest()}"

    @cached_property
    def content_hashes(self) -> list[bytes]:
        """SHA-256 of the content of every sample, without id and label, in order. All data are read once."""
        hashes = []
        for start in range(0, len(self), CHUNK):
            for contents in self._source.contents(self._positions[start : start + CHUNK]):
                digest = hashlib.sha256(repr((self.modality, *map(len, contents))).encode())
                for content in contents:
                    digest.update(content)
                hashes.append(digest.digest())
        return hashes

    def renumbered(self, numbers: Sequence[int], names: Sequence[str]) -> Samples:
        """Return the same samples with renumbered classes. The fingerprint and splits stay the same.

        Args:
            numbers: The new number of each class, in the order of the classes of the data. Each at most once.
            names: Names of all classes in their new order.

        Example:
            >>> samples = Samples.of(["a", "b", "c"], label=[0, 1, 1])
            >>> samples.renumbered([2, 0], ["no", "perhaps", "yes"]).labels
            [2, 0, 0]
        """
        if len(numbers) != self.num_classes or len(set(numbers)) < len(numbers):
            raise ValueError(f"numbers must be distinct, one for each of {self.num_classes} classes, got {numbers}")
        if any(not 0 <= number < len(names) for number in numbers):
            raise ValueError(f"numbers must be from 0 to {len(names) - 1}, one for each of the names, got {numbers}")
        before = self._source.numbers
        after = tuple(numbers) if before is None else tuple(numbers[number] for number in before)
        return Samples(dataclasses.replace(self._source, numbers=after, label_names=tuple(names)), self._positions)

    def select(self, indices: Iterable[int]) -> Samples:
        """Return the samples at the indices, in this order.

        Args:
            indices: Integers from 0 to ``len(self) - 1``, each at most once.
        """
        checked_indices = []
        for index in indices:
            # Booleans are integers in Python: a mask would select samples 0 and 1.
            if isinstance(index, (bool, np.bool_)) or str(getattr(index, "dtype", "")) == "torch.bool":
                raise TypeError("select requires indices, got a boolean mask; pass mask.nonzero()")
            checked_indices.append(operator.index(index))
            if not 0 <= checked_indices[-1] < len(self):
                raise ValueError(f"index {checked_indices[-1]} is out of range for {len(self)} samples")
        repeated = [index for index, count in Counter(checked_indices).items() if count > 1]
        if repeated:
            raise ValueError(f"index {repeated[0]} is selected more than once; ids must stay unique")
        return Samples(self._source, [self._positions[index] for index in checked_indices])

    def take(self, n: int) -> Samples:
        """Return the first ``n`` samples."""
        if not 1 <= n <= len(self):
            raise ValueError(f"n must be 1 to {len(self)}, the number of samples, got {n}")
        return Samples(self._source, self._positions[:n])

    @checked
    def split(self, test_size: Share | Count, seed: Natural = 0) -> tuple[Samples, Samples]:
        """Split into training and held-out samples at random.

        The assignment is a hash of seed and id, so it does not depend on the order of the samples, the machine or any
        random state. Labelled data are split by class (stratified); samples without a label form an additional class.
        Remainders go to the classes with the largest remainders, smaller labels first. Both parts keep the order.

        Args:
            test_size: Share (float between 0 and 1) or number (integer) of held-out samples.
            seed: Seed of the hash.
        """
        count = test_size if isinstance(test_size, Integral) else round(float(test_size) * len(self))
        if not 0 < count < len(self):
            raise ValueError(f"test_size={test_size} leaves one part of {len(self)} samples empty")
        strata: dict[int, list[int]] = {}
        for index, position in enumerate(self._positions):
            label = self._source.labels[position] if self._source.labels is not None else None
            strata.setdefault(-1 if label is None else label, []).append(index)
        by_label = [strata[label] for label in sorted(strata)]
        test: set[int] = set()
        for stratum, quota in zip(by_label, apportion(count, [len(stratum) for stratum in by_label]), strict=True):
            test.update(sorted(stratum, key=lambda index: chance(seed, self.ids[index]))[:quota])
        return (self.select(index for index in range(len(self)) if index not in test), self.select(sorted(test)))

    @checked
    def batches(self, batch_size: Count, progress: str | None = None) -> Iterator[Batch]:
        """Read the samples in batches, in order; the last batch may be smaller. Missing samples (None) raise errors.

        Args:
            batch_size: Samples per batch.
            progress: Label of a progress bar, which appears on terminals after three seconds; elsewhere, a line reports
                the progress each minute. None: no bar.
        """
        return self._batches(batch_size, progress)

    def _batches(self, batch_size: int, progress: str | None) -> Iterator[Batch]:
        with progress_bar(progress, len(self), "sample") as bar:
            for start in range(0, len(self), batch_size):
                origin = Samples(self._source, self._positions[start : start + batch_size])
                samples = self._source.read(origin._positions)
                for id_, sample in zip(origin.ids, samples, strict=True):
                    if (missing := missing_in(sample, self.modality)) is not None:
                        raise ValueError(f"sample {id_!r} lacks {missing}; drop it with select")
                yield Batch(RawSamples(samples, origin.ids), origin)
                bar.update(len(origin))


def check_same_order(a: Samples | Sequence[Id], b: Samples | Sequence[Id]) -> None:
    """Check that two sides contain the same samples in the same order.

    Default ids are positions, which are equal in any order of the samples. Different labels of two :class:`Samples`
    issue a warning.

    Args:
        a: Samples, or their ids.
        b: Samples, or their ids.

    Example:
        >>> check_same_order([1, 2, 3], [1, 3, 2])
        Traceback (most recent call last):
        ...
        ValueError: the sides first differ at index 1: id 2 and id 3. They have the same samples in a different order.
        See https://github.com/hf-stitch/hf-stitch/blob/main/docs/errors/other-order.md
    """
    left, right = (side.ids if isinstance(side, Samples) else tuple(side) for side in (a, b))
    if left == right:
        if isinstance(a, Samples) and isinstance(b, Samples):
            _warn_of_other_labels(a, b)
        return
    index = next((i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), min(len(left), len(right)))
    x, y = (f"id {side[index]!r}" if index < len(side) else "no more samples" for side in (left, right))
    if Counter(left) == Counter(right):
        remedy = "They have the same samples in a different order."
    else:
        remedy = f"They have different samples ({len(left)} and {len(right)})."
    raise ValueError(f"the sides first differ at index {index}: {x} and {y}. {remedy}{see('other-order')}")


def _warn_of_other_labels(a: Samples, b: Samples) -> None:
    """Warn if samples with the same ids have different labels, which suggests different orders of the sides."""
    labels = [side._source.labels for side in (a, b)]
    if labels[0] is None or labels[1] is None:
        return
    labelled = [
        (id_, labels[0][position_a], labels[1][position_b])
        for id_, position_a, position_b in zip(a.ids, a._positions, b._positions, strict=True)
    ]
    different = [(id_, x, y) for id_, x, y in labelled if x is not None and y is not None and x != y and min(x, y) >= 0]
    if different:
        id_, x, y = different[0]
        warn(
            f"{len(different)} of {len(a)} samples have a different label on the second side (first: {id_!r}, {x} and "
            f"{y}): is it in the same order? Pass ids for both sides, Samples.of(data, id=…), to check; if only class "
            "numbers differ, remove the labels of the second side"
        )


class Readable(Constraint):
    """Data that :meth:`Samples.of` accepts."""

    def __contains__(self, value: Any) -> bool:
        import datasets
        import torch
        from torch.utils.data import DataLoader, Dataset

        dataset_types = (datasets.Dataset, datasets.IterableDataset, Dataset, DataLoader)
        types = (Samples, *dataset_types, Sequence, np.ndarray, torch.Tensor)
        return isinstance(value, types) and not isinstance(value, str | bytes) and not self.hint(value)

    def __str__(self) -> str:
        return (
            "a dataset (datasets or torch.utils.data), a DataLoader, a list of images, texts, tensors, dictionaries "
            "or pairs of a sample and a label, an array or a tensor"
        )

    def hint(self, value: Any) -> str:
        """Return advice for a dataset with all its splits."""
        import datasets

        several = isinstance(value, datasets.DatasetDict | datasets.IterableDatasetDict)
        return f"pass one of its splits, {', '.join(value)}" if several else ""


Data = Annotated[Any, Readable()]
"""Raw samples in any form that :meth:`Samples.of` accepts."""


def chance(seed: int, id_: Id) -> bytes:
    """Return a pseudorandom sort key from a seed and an id."""
    return hashlib.blake2b(repr((operator.index(seed), id_)).encode(), digest_size=8).digest()


def apportion(count: int, sizes: Sequence[int]) -> list[int]:
    """Divide ``count`` in proportion to ``sizes``, by the largest-remainder method."""
    total = sum(sizes)
    quotas = [count * size // total for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda i: -(count * sizes[i] % total))
    for i in by_remainder[: count - sum(quotas)]:
        quotas[i] += 1
    return quotas
