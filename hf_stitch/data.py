"""The raw samples that both networks see: :class:`Samples`, and :func:`read_data` to get hold of some.

Nothing is preprocessed here. A batch holds the images, texts or tensors as the data has them, and each network turns
them into inputs itself, so that two networks with different processors can be shown the same samples.
"""

from __future__ import annotations

import hashlib
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast, get_args

import numpy as np
from PIL.Image import Image, fromarray

if TYPE_CHECKING:
    import datasets

__all__ = ["Batch", "Id", "Modality", "Samples", "check_same_order", "paired_batches", "read_data"]

Id = int | str
Modality = Literal["image", "text", "tensor"]

_CHUNK = 1000
"""How many samples are read at a time to compute a fingerprint."""


@dataclass(frozen=True)
class Batch:
    """Consecutive samples, read.

    Attributes:
        samples: PIL images, texts, pairs of texts, tensors or arrays, as the data has them.
        origin: The part of the data that they are.
    """

    samples: list[Any]
    origin: Samples

    @property
    def ids(self) -> tuple[Id, ...]:
        """The ids of the samples."""
        return self.origin.ids

    @property
    def labels(self) -> list[int] | None:
        """The labels of the samples, checked as :attr:`Samples.labels`."""
        return self.origin.labels


class Samples:
    """Raw samples in a fixed order, each with an id and, where the data has them, a label.

    Made by :meth:`of`. Parts (:meth:`select`, :meth:`take`, :meth:`split`) share the data and keep ids and labels.

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

    def __init__(self, source: _Source, positions: Sequence[int]) -> None:
        if not len(positions):
            raise ValueError("there are no samples: the data, or the part of it that was asked for, is empty")
        self._source = source
        self._positions = positions

    @classmethod
    def of(
        cls,
        data: Any,
        *,
        image: str | None = None,
        text: str | None = None,
        text_pair: str | None = None,
        label: str | Iterable[Any] | None = None,
        id: str | Iterable[Any] | None = None,
    ) -> Samples:
        """Take data as it comes and find its images or texts, its labels and its ids.

        Columns are found by their type: images by the feature ``Image``, texts by ``string``, labels by ``ClassLabel``
        or, failing that, as integers in a column called ``label`` or ``labels``. Of dictionaries the first one tells.

        Args:
            data: A ``datasets.Dataset``; a ``datasets.IterableDataset``, which is read once, to its end, into memory
                (images stay encoded; bound it by ``data.take(n)``); a list or tuple of PIL images, texts, pairs of
                texts, arrays or tensors, or of dictionaries of those; an array or a tensor whose first axis counts
                samples; or :class:`Samples`, returned as they are.
            image: Column of the images.
            text: Column of the texts.
            text_pair: Column of the second texts, where a sample is a pair of texts. Needs ``text``.
            label: Column of the labels, or the labels themselves.
            id: Column of the ids, or the ids themselves: integers or texts, each once. Default: positions in ``data``.

        Raises:
            ValueError: If the data is empty, if several columns could be meant (the message lists them), if a named
                column does not exist or has the wrong type, or if ids repeat.
            TypeError: If the data is of no known kind, a label is no integer or an id neither integer nor text.
        """
        if isinstance(data, Samples):
            if any(value is not None for value in (image, text, text_pair, label, id)):
                raise ValueError("these samples were read before, and their columns cannot be chosen again")
            return data
        table = _table(data)
        named = [name for name in (image, text, text_pair, label, id) if isinstance(name, str)]
        if isinstance(label, str):
            _check_named(table.kinds, "label", label, ("class", "integer"))
        if isinstance(id, str):
            _check_named(table.kinds, "id", id, ("integer", "text"))
        modality, columns = _find_samples(table.kinds, image, text, text_pair, taken=named)
        if label is None:
            label = _find_label(table.kinds, taken=named)
        ids = range(len(table)) if id is None else _as_ids(_values(table, "id", id))
        labels = None if label is None else list(map(_as_label, _values(table, "label", label), ids))
        names = table.classes(label) if isinstance(label, str) else None
        return cls(_Source(table, modality, columns, ids, labels, names), range(len(table)))

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._positions)

    def __repr__(self) -> str:
        """For example ``Samples(10000 x image, 10 classes)``."""
        classes = "" if self.num_classes is None else f", {self.num_classes} classes"
        return f"Samples({len(self)} x {self.modality}{classes})"

    @property
    def modality(self) -> Modality:
        """What a sample is: ``image``, ``text`` (a text or a pair of texts) or ``tensor``."""
        return self._source.modality

    @cached_property
    def ids(self) -> tuple[Id, ...]:
        """The id of every sample, in order."""
        return tuple(self._source.ids[p] for p in self._positions)

    @cached_property
    def labels(self) -> list[int] | None:
        """The label of every sample, in order; ``None`` if the data has no labels.

        Raises:
            ValueError: If a sample has no label (``None``, -1) or one that is no class; the message names the sample.
        """
        if self._source.labels is None:
            return None
        labels = []
        for id_, position in zip(self.ids, self._positions, strict=True):
            label = self._source.labels[position]
            if label is None or not 0 <= label < (self.num_classes or 0):
                raise ValueError(
                    f"sample {id_!r} has the label {label}, which is none of the {self.num_classes} classes; "
                    "leave unlabelled samples out by select"
                )
            labels.append(label)
        return labels

    @property
    def label_names(self) -> tuple[str, ...] | None:
        """What the classes are called, where the data says so."""
        return self._source.label_names

    @property
    def num_classes(self) -> int | None:
        """Number of classes of the whole data, of which this may be a part; ``None`` if the data has no labels.

        Where the classes have no names it is one more than the largest label.
        """
        return self._source.num_classes

    @cached_property
    def fingerprint(self) -> str:
        """Hash of every sample's id, label and content, in order: ``"sha256:…"``.

        The content of an image in a data set is its encoded file (the same pixels in another format are other data); of
        other images the mode, size and pixels; of arrays and tensors the dtype, shape and values. Computing it reads
        all of the data once.
        """
        digest = hashlib.sha256(self.modality.encode())
        for start in range(0, len(self), _CHUNK):
            positions = self._positions[start : start + _CHUNK]
            for position, contents in zip(positions, self._source.contents(positions), strict=True):
                label = self._source.labels[position] if self._source.labels is not None else None
                digest.update(repr((self._source.ids[position], label, *map(len, contents))).encode())
                for content in contents:
                    digest.update(content)
        return f"sha256:{digest.hexdigest()}"

    def select(self, indices: Iterable[int]) -> Samples:
        """The samples at these places, in this order.

        Args:
            indices: Integers from 0 to ``len(self) - 1``, each at most once.

        Raises:
            ValueError: If an index is out of range or occurs twice, or if there is none.
            TypeError: If an index is no integer (a boolean mask).
        """
        chosen = []
        for index in indices:
            # A mask would be taken for zeros and ones.
            if isinstance(index, (bool, np.bool_)) or str(getattr(index, "dtype", "")) == "torch.bool":
                raise TypeError("select takes indices, got a boolean mask; pass mask.nonzero()")
            chosen.append(operator.index(index))
            if not 0 <= chosen[-1] < len(self):
                raise ValueError(f"index {chosen[-1]} is out of range: there are {len(self)} samples")
        twice = [index for index, count in Counter(chosen).items() if count > 1]
        if twice:
            raise ValueError(f"index {twice[0]} is selected more than once; ids must stay unique")
        return Samples(self._source, [self._positions[index] for index in chosen])

    def take(self, n: int) -> Samples:
        """The first ``n`` samples.

        Raises:
            ValueError: If there are fewer, or ``n`` is less than 1.
        """
        if not 1 <= n <= len(self):
            raise ValueError(f"n must be 1 to {len(self)}, the number of samples, got {n}")
        return Samples(self._source, self._positions[:n])

    def split(self, test_size: float | int, seed: int = 0) -> tuple[Samples, Samples]:
        """Hold samples out, at random.

        Chance is a hash of seed and id, so that the split does not depend on the order of the samples, on the machine
        or on any random state. Where there are labels, classes are held out in proportion (samples without a label as
        one more class); what does not divide goes to the classes with the largest remainders, smaller labels first.
        Both parts keep the order.

        Args:
            test_size: Share of the samples (a float between 0 and 1) or their number (an integer).
            seed: Another seed gives another split.

        Returns:
            Training part and held-out part. Every sample is in exactly one.

        Raises:
            ValueError: If a part would be empty.
        """
        count = round(test_size * len(self)) if isinstance(test_size, float) else operator.index(test_size)
        if not 0 < count < len(self):
            raise ValueError(f"test_size={test_size} of {len(self)} samples leaves a part empty")
        strata: dict[int, list[int]] = {}
        for index, position in enumerate(self._positions):
            label = self._source.labels[position] if self._source.labels is not None else None
            strata.setdefault(-1 if label is None else label, []).append(index)
        ordered = [strata[label] for label in sorted(strata)]
        held: set[int] = set()
        for stratum, quota in zip(ordered, apportion(count, [len(stratum) for stratum in ordered]), strict=True):
            held.update(sorted(stratum, key=lambda index: chance(seed, self.ids[index]))[:quota])
        return (
            self.select(index for index in range(len(self)) if index not in held),
            self.select(sorted(held)),
        )

    def batches(self, batch_size: int, progress: str | None = None) -> Iterator[Batch]:
        """Read the samples in order, batch after batch; the last one may be smaller.

        Args:
            batch_size: Samples in a batch.
            progress: What a progress bar says; it appears on terminals, after three seconds. ``None``: no bar.

        Raises:
            ValueError: If ``batch_size`` is less than 1, or if a sample is missing (``None``); the message names it.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        return self._batches(batch_size, progress)

    def _batches(self, batch_size: int, progress: str | None) -> Iterator[Batch]:
        from tqdm.auto import tqdm

        hide = True if progress is None else None  # None: shown on terminals only
        with tqdm(total=len(self), desc=progress, unit="sample", delay=3, disable=hide) as bar:
            for start in range(0, len(self), batch_size):
                part = Samples(self._source, self._positions[start : start + batch_size])
                samples = self._source.read(part._positions)
                for id_, sample in zip(part.ids, samples, strict=True):
                    if sample is None or (isinstance(sample, tuple) and None in sample):
                        raise ValueError(f"sample {id_!r} has no {self.modality}; leave it out with select")
                yield Batch(samples, part)
                bar.update(len(part))


def paired_batches(
    a: Samples, b: Samples, batch_size: int, progress: str | None = None
) -> Iterator[tuple[Batch, Batch]]:
    """The batches of two sides in step; where both are the same samples, each is read once.

    Args:
        a: One side.
        b: The other, with as many samples.
        batch_size: Samples per batch.
        progress: What the progress bar says; ``None``: no bar.
    """
    if a is b:
        for batch in a.batches(batch_size, progress):
            yield batch, batch
    else:
        yield from zip(a.batches(batch_size, progress), b.batches(batch_size), strict=True)


def check_same_order(a: Samples | Sequence[Id], b: Samples | Sequence[Id]) -> None:
    """Make sure that two sides hold the same samples in the same order.

    Args:
        a: Samples, or their ids.
        b: Samples, or their ids.

    Raises:
        ValueError: If they do not; the message shows the first difference.

    Example:
        >>> check_same_order([1, 2, 3], [1, 3, 2])
        Traceback (most recent call last):
        ...
        ValueError: the two sides differ first at place 1: id 2 and id 3. They hold the same samples in another order.
    """
    left, right = (side.ids if isinstance(side, Samples) else tuple(side) for side in (a, b))
    if left == right:
        return
    place = next((i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), min(len(left), len(right)))
    x, y = (f"id {side[place]!r}" if place < len(side) else "no more samples" for side in (left, right))
    if Counter(left) == Counter(right):
        remedy = "They hold the same samples in another order."
    else:
        remedy = f"They hold different samples ({len(left)} and {len(right)})."
    raise ValueError(f"the two sides differ first at place {place}: {x} and {y}. {remedy}")


def read_data(source: str, data_dir: str | Path | None = None, split: str | None = None) -> datasets.Dataset:
    """One split of a data set, from the Hub, from a folder, or from inside scikit-learn.

    Args:
        source: A Hub id ``owner/name`` or ``owner/name/config``; a folder of data files named after their splits, such
            as ``train.parquet`` and ``test.parquet``; or ``sklearn:digits``: the 1797 images of handwritten digits, 8x8
            pixels, that scikit-learn ships, 1438 to train and 359 to test.
        data_dir: Where copies of data sets lie: the Hub's ``owner/name/config`` is then read from
            ``<data_dir>/name/config``, and the Hub is not asked.
        split: Which split, of the Hub's and of folders also in part (``"train[:1000]"``); may be left out where there
            is one only.

    Raises:
        FileNotFoundError: If the data set is not there, or the Hub cannot be reached.
        ValueError: If there is no such split, or several and none was named.

    Example:
        >>> digits = read_data("sklearn:digits", split="test")
        >>> Samples.of(digits)
        Samples(359 x image, 10 classes)
    """
    from datasets import Dataset, load_dataset

    if source == "sklearn:digits":
        return _pick_split(_digits(), source, split)
    if Path(source).expanduser().is_dir():
        arguments = [str(Path(source).expanduser())]
    elif data_dir is not None:
        arguments = [str(Path(data_dir).expanduser().joinpath(*source.split("/")[1:] or [source]))]
    else:
        owner, name, config = (*source.split("/", 2), None, None)[:3]
        arguments = [part for part in (f"{owner}/{name}" if name else owner, config) if part]
    try:
        found = load_dataset(*arguments, split=split)
    except OSError as error:
        raise FileNotFoundError(
            f"cannot read the data set {'/'.join(arguments)}: {error}. Check its name, or say where a copy lies: "
            f"data_dir (--data-dir), a folder that holds {source.split('/')[-1]}/<split>.parquet"
        ) from error
    return found if isinstance(found, Dataset) else _pick_split(found, source, split)


# -- where samples are read from ---------------------------------------------------------------------------------------


class _Table(Protocol):
    """Columns of data, whatever holds them."""

    @property
    def kinds(self) -> Mapping[str, str]:
        """What is in each column: a modality, ``class``, ``integer``, or another type by its name."""

    def __len__(self) -> int: ...

    def column(self, name: str) -> list[Any]:
        """All of a column of labels or ids."""

    def classes(self, name: str) -> tuple[str, ...] | None:
        """What the classes of a column of labels are called."""

    def read(self, name: str, positions: Sequence[int]) -> list[Any]:
        """Raw samples."""

    def contents(self, name: str, positions: Sequence[int]) -> Iterable[bytes]:
        """The bytes that identify raw samples."""


class _Stored:
    """The columns of a ``datasets.Dataset``."""

    def __init__(self, dataset: datasets.Dataset) -> None:
        if dataset.format["type"] == "custom":
            raise ValueError("the data set has a transform, which raw samples miss; apply it by map, or reset_format()")
        self.dataset = dataset.with_format(None)
        self.kinds = {name: _feature_kind(feature) for name, feature in dataset.features.items()}

    def __len__(self) -> int:
        return len(self.dataset)

    def column(self, name: str) -> list[Any]:
        return list(self.dataset[name][:])

    def classes(self, name: str) -> tuple[str, ...] | None:
        return tuple(self.dataset.features[name].names) if self.kinds[name] == "class" else None

    def read(self, name: str, positions: Sequence[int]) -> list[Any]:
        return list(self.dataset[name][positions])

    def contents(self, name: str, positions: Sequence[int]) -> Iterable[bytes]:
        if self.kinds[name] != "image":
            return map(_content, self.read(name, positions))
        from datasets.table import embed_table_storage

        # Decoded pixels may differ between versions of a decoder; files that are only pointed to are read.
        files = embed_table_storage(self.dataset.select_columns([name]).with_format("arrow")[positions])
        return ((file or {}).get("bytes") or b"" for file in files[name].to_pylist())


class _Listed:
    """Columns in memory: lists, arrays or tensors."""

    def __init__(self, columns: Mapping[str, Sequence[Any]]) -> None:
        self.columns = columns
        self.kinds = {name: _common_kind(values) for name, values in columns.items()}

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def column(self, name: str) -> list[Any]:
        return list(self.columns[name])

    def classes(self, name: str) -> tuple[str, ...] | None:
        return None

    def read(self, name: str, positions: Sequence[int]) -> list[Any]:
        return [self.columns[name][position] for position in positions]

    def contents(self, name: str, positions: Sequence[int]) -> Iterable[bytes]:
        return map(_content, self.read(name, positions))


@dataclass(frozen=True, eq=False)
class _Source:
    """All of the data, in its original order; :class:`Samples` are positions in it."""

    table: _Table
    modality: Modality
    columns: tuple[str, ...]
    ids: Sequence[Id]
    labels: list[int | None] | None
    label_names: tuple[str, ...] | None

    @cached_property
    def num_classes(self) -> int | None:
        if self.labels is None:
            return None
        if self.label_names is not None:
            return len(self.label_names)
        return 1 + max((label for label in self.labels if label is not None), default=-1)

    def read(self, positions: Sequence[int]) -> list[Any]:
        """Raw samples; pairs where there are two columns."""
        columns = [self.table.read(name, positions) for name in self.columns]
        return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))

    def contents(self, positions: Sequence[int]) -> Iterator[tuple[bytes, ...]]:
        """The bytes that identify each sample, column by column."""
        return zip(*(self.table.contents(name, positions) for name in self.columns), strict=True)


def _table(data: Any) -> _Table:
    """Data of any kind, as columns."""
    import datasets
    import torch

    if isinstance(data, (datasets.DatasetDict, datasets.IterableDatasetDict)):
        raise TypeError(f"data must be one split, got a dictionary of splits: {', '.join(data)}")
    if isinstance(data, datasets.IterableDataset):
        data = _download(data)
    if isinstance(data, datasets.Dataset):
        return _Stored(data)
    if not isinstance(data, (list, tuple, np.ndarray, torch.Tensor)):
        raise TypeError(
            f"data must be a datasets.Dataset, a list of images, texts, tensors or dictionaries, an array or a tensor, "
            f"got {type(data).__name__}"
        )
    if not len(data):
        raise ValueError("there are no samples: the data is empty")
    rows = cast(Sequence[Any], data)
    if not isinstance(rows[0], Mapping):
        return _Listed({"samples": rows})
    for place, row in enumerate(rows):
        if not isinstance(row, Mapping) or set(row) != set(rows[0]):
            raise ValueError(f"sample {place} must be a dictionary with the keys of sample 0: {', '.join(rows[0])}")
    return _Listed({name: [row[name] for row in rows] for name in rows[0]})


def _download(stream: datasets.IterableDataset) -> datasets.Dataset:
    """All of a stream, in memory; images stay encoded."""
    from datasets import Dataset, concatenate_datasets

    parts = [Dataset(table) for table in stream.with_format("arrow").iter(batch_size=_CHUNK)]
    if not parts:
        raise ValueError("there are no samples: the stream is empty")
    return concatenate_datasets(parts)


def _content(sample: Any) -> bytes:
    """The bytes that identify a sample in memory."""
    if isinstance(sample, Image):
        return repr((sample.mode, sample.size, sample.getpalette())).encode() + sample.tobytes()
    if _kind(sample) == "tensor":
        import torch

        tensor = torch.as_tensor(sample).detach().cpu().contiguous()
        values: bytes = tensor.flatten().view(torch.uint8).numpy().tobytes()
        return repr((str(tensor.dtype), tuple(tensor.shape))).encode() + values
    return repr(sample).encode()


# -- which column is what ----------------------------------------------------------------------------------------------


def _kind(value: Any) -> str:
    """A modality, ``integer``, or the name of the value's type."""
    if isinstance(value, str) or (
        isinstance(value, tuple) and len(value) == 2 and all(isinstance(v, str) for v in value)
    ):
        return "text"
    if isinstance(value, Image):
        return "image"
    if isinstance(value, (int, np.integer)):
        return "integer"
    import torch

    return "tensor" if isinstance(value, (np.ndarray, torch.Tensor)) else type(value).__name__


def _common_kind(values: Sequence[Any]) -> str:
    """The kind of all values; where one differs, a text that is no kind and says which."""
    first = _kind(values[0])
    # Arrays are of one kind by themselves.
    for place, value in enumerate(values) if isinstance(values, (list, tuple)) else ():
        if _kind(value) != first:
            return f"{first}, but {_kind(value)} at place {place}"
    return first


def _feature_kind(feature: Any) -> str:
    """A modality, ``class``, ``integer``, or the name of the feature's type."""
    import datasets

    if isinstance(feature, datasets.ClassLabel):
        return "class"
    if isinstance(feature, datasets.Image):
        return "image"
    if isinstance(feature, datasets.Value):
        if feature.dtype in ("string", "large_string"):
            return "text"
        return "integer" if feature.dtype.startswith(("int", "uint", "bool")) else feature.dtype
    return type(feature).__name__


def _listing(kinds: Mapping[str, str]) -> str:
    return ", ".join(f"{name!r} ({kind})" for name, kind in kinds.items())


def _check_named(kinds: Mapping[str, str], role: str, name: str, allowed: Sequence[str]) -> None:
    """Refuse a column that does not exist or cannot play its role."""
    if name not in kinds:
        raise ValueError(f"{role}={name!r} is no column; there are: {_listing(kinds)}")
    if kinds[name] not in allowed:
        raise ValueError(f"{role}={name!r} must be a column of {' or '.join(allowed)}, got {kinds[name]}")


def _find_samples(
    kinds: Mapping[str, str], image: str | None, text: str | None, text_pair: str | None, taken: Iterable[Any]
) -> tuple[Modality, tuple[str, ...]]:
    """The modality, and the column of the samples: the named one or the only one that can be meant."""
    if image is not None and text is not None:
        raise ValueError("image and text cannot both be named: a sample is one or the other")
    if text_pair is not None and text is None:
        raise ValueError("text_pair names the second texts; name the first by text")
    for role, name in (("image", image), ("text", text), ("text", text_pair)):
        if name is not None:
            _check_named(kinds, role, name, (role,))
    if text is not None:
        return "text", (text,) if text_pair is None else (text, text_pair)
    if image is not None:
        return "image", (image,)
    candidates = {name: kind for name, kind in kinds.items() if kind in get_args(Modality) and name not in taken}
    if len(candidates) != 1:
        many = f"several columns could be the samples: {_listing(candidates)}; name one by image= or text="
        none = f"no column is an image, a text or a tensor; there are: {_listing(kinds)}. Labels are passed by label="
        raise ValueError(many if candidates else none)
    [(name, kind)] = candidates.items()
    return cast(Modality, kind), (name,)


def _find_label(kinds: Mapping[str, str], taken: Iterable[Any]) -> str | None:
    """The only column that can be meant by labels, or none."""
    classes = [name for name, kind in kinds.items() if kind == "class" and name not in taken]
    # A column with gaps is one of labels too: reading these names the sample that has none.
    integers = [name for name in ("label", "labels") if "integer" in kinds.get(name, "") and name not in taken]
    candidates = classes or integers
    if len(candidates) > 1:
        raise ValueError(f"several columns could be the labels: {', '.join(map(repr, candidates))}; name one by label=")
    return candidates[0] if candidates else None


def _values(table: _Table, role: str, given: str | Iterable[Any]) -> list[Any]:
    """A column by its name, or values as they were given, one to a sample."""
    if isinstance(given, str):
        return table.column(given)
    values = list(given.tolist() if isinstance(given, np.ndarray) else given)
    if len(values) != len(table):
        raise ValueError(f"{role} must have one value for each of {len(table)} samples, got {len(values)}")
    return values


def _as_label(value: Any, id_: Id) -> int | None:
    try:
        return None if value is None else int(operator.index(value))
    except TypeError as error:
        raise TypeError(f"labels must be integers, got {value!r} for sample {id_!r}") from error


def _as_ids(values: Iterable[Any]) -> list[Id]:
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


# -- holding samples out -----------------------------------------------------------------------------------------------


def chance(seed: int, id_: Id) -> bytes:
    """A number that looks random, of a seed and an id."""
    return hashlib.blake2b(repr((operator.index(seed), id_)).encode(), digest_size=8).digest()


def apportion(count: int, sizes: Sequence[int]) -> list[int]:
    """Parts of ``count`` in proportion to ``sizes``, by largest remainder."""
    total = sum(sizes)
    quotas = [count * size // total for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda i: -(count * sizes[i] % total))
    for i in by_remainder[: count - sum(quotas)]:
        quotas[i] += 1
    return quotas


# -- data sets by name -------------------------------------------------------------------------------------------------


def _pick_split(splits: Mapping[str, datasets.Dataset], source: str, split: str | None) -> datasets.Dataset:
    if split is None and len(splits) == 1:
        return next(iter(splits.values()))
    if split is None or split not in splits:
        asked = "needs a split" if split is None else f"has no split {split!r}"
        raise ValueError(f"{source} {asked}; there are: {', '.join(splits)}")
    return splits[split]


def _digits() -> dict[str, datasets.Dataset]:
    """The handwritten digits inside scikit-learn; its 17 grey values are spread over 0 to 255."""
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
