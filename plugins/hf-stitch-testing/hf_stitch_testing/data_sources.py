"""Conformance check for sources of data sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hf_stitch.data import DataSource, Samples, read_data
from hf_stitch.registry import registries
from hf_stitch_testing.kit import Kit, must, require, require_error, require_registered, skip_unless
from hf_stitch_testing.parts import conformance

if TYPE_CHECKING:
    import datasets

    Splits = Mapping[str, datasets.Dataset]


@conformance
def check_data_source(
    source: str | type[DataSource] | DataSource, place: str, missing: str | None = None
) -> _DataSourceKit:
    """Check that a source of data sets satisfies the contract of ``DataSource``.

    The parts:

    - ``name``: its name is text without a colon, under which the registry has no other source, and it needs no
      arguments.
    - ``splits``: it gives at least one split, by names, and each is a ``datasets.Dataset`` that is not empty.
    - ``samples``: ``Samples.of`` finds samples in each split.
    - ``repeatable``: two readings are equal in order and content.
    - ``missing``: a place that does not exist raises a ``FileNotFoundError`` or ``ValueError`` that names it.
    - ``read_data``: ``read_data("name:place")`` gives the same samples, if the source is registered.

    Args:
        source: Name in the registry of data, a class, or a source.
        place: A small data set that it reads.
        missing: A place that it cannot read; by default ``no-such-place``.

    Example:
        >>> check_data_source("sklearn", "digits")
    """
    return _DataSourceKit(source, place, "no-such-place" if missing is None else missing)


class _DataSourceKit(Kit):
    def __init__(self, given: str | type[DataSource] | DataSource, place: str, absent: str) -> None:
        self._given, self.place, self.absent = given, place, absent

    @cached_property
    def source(self) -> DataSource:
        return self._given() if isinstance(self._given, type) else registries.data.build(self._given)

    @cached_property
    def read(self) -> Splits:
        return self.source.splits(self.place)

    def _cases(self) -> Iterator[tuple[str, datasets.Dataset]]:
        yield from self.read.items()

    def name(self) -> None:
        name, kind = getattr(self.source, "name", None), type(self.source)
        plain = isinstance(name, str) and name != "" and ":" not in name
        require(plain, f"name must be text without a colon, got {name!r}")
        if name in registries.data:
            require_registered(registries.data, self.source)
        with must(f"{kind.__name__} must need no arguments"):
            kind()

    def splits(self) -> None:
        import datasets

        named = isinstance(self.read, Mapping) and all(isinstance(name, str) and name for name in self.read)
        require(named, f"splits must be a mapping from names, got {self.read!r:.200}")
        require(len(self.read) > 0, "there must be at least one split")
        for name, split in self.read.items():
            kind = type(split).__name__
            require(isinstance(split, datasets.Dataset), f"split {name!r} must be a datasets.Dataset, got {kind}")
            require(len(split) > 0, f"split {name!r} must not be empty")

    def samples(self, name: str, split: datasets.Dataset) -> None:
        with must(f"Samples.of must find the samples of split {name!r}"):
            found = next(iter(Samples.of(split).batches(1))).samples
        require(len(found) == 1, f"split {name!r} must give one sample in a batch of one, got {len(found)}")

    def repeatable(self) -> None:
        self._require_equal(type(self.source)().splits(self.place), "two readings")

    def missing(self) -> None:
        errors = (FileNotFoundError, ValueError)
        require_error(errors, lambda: self.source.splits(self.absent), self.absent, self.absent)

    def read_data(self) -> None:
        name = self.source.name
        skip_unless(name in registries.data, f"{name!r} is not registered")
        others = {split: read_data(f"{name}:{self.place}", split=split) for split in self.read}
        self._require_equal(others, "splits and read_data")

    def _require_equal(self, others: Splits, what: str) -> None:
        same = list(self.read) == list(others)
        require(same, f"{what} must give the same splits, got {list(self.read)} and {list(others)}")
        for name, split in self.read.items():
            other = others[name]
            require(split.features == other.features, f"{what} of split {name!r} must have equal features")
            require(len(split) == len(other), f"{what} of split {name!r} have {len(split)} and {len(other)} samples")
            for row, (one, two) in enumerate(zip(_stored(split), _stored(other), strict=True)):
                require(one == two, f"{what} of split {name!r} differ in row {row}: {one!r:.100} and {two!r:.100}")


def _stored(split: datasets.Dataset) -> Iterator[dict[str, Any]]:
    """Iterate over rows as they are stored: lists, numbers, texts and bytes, with no image or sound decoded."""
    for batch in split.with_format("arrow").iter(1000):
        yield from batch.to_pylist()
