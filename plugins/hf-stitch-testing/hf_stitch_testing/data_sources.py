"""Conformance check for dataset sources."""

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
    """Check that a dataset source satisfies the contract of ``DataSource``.

    The parts:

    - ``name``: the name is a string without a colon, unique in the registry; the class requires no arguments.
    - ``splits``: the source returns at least one named split, each a non-empty ``datasets.Dataset``.
    - ``samples``: ``Samples.of`` finds samples in each split.
    - ``repeatable``: repeated reads are equal in order and content.
    - ``missing``: a missing place raises a ``FileNotFoundError`` or ``ValueError`` that names it.
    - ``read_data``: ``read_data("name:place")`` returns the same samples, if the source is registered.

    Args:
        source: Name in the registry of data, a class, or a source.
        place: Place of a small dataset.
        missing: A missing place. Default: ``no-such-place``.

    Example:
        >>> check_data_source("sklearn", "digits")
    """
    return _DataSourceKit(source, place, "no-such-place" if missing is None else missing)


class _DataSourceKit(Kit):
    def __init__(self, source: str | type[DataSource] | DataSource, place: str, absent: str) -> None:
        self._source, self.place, self.absent = source, place, absent

    @cached_property
    def source(self) -> DataSource:
        return self._source() if isinstance(self._source, type) else registries.data.build(self._source)

    @cached_property
    def loaded(self) -> Splits:
        return self.source.splits(self.place)

    def _cases(self) -> Iterator[tuple[str, datasets.Dataset]]:
        yield from self.loaded.items()

    def name(self) -> None:
        name, kind = getattr(self.source, "name", None), type(self.source)
        is_valid = isinstance(name, str) and name != "" and ":" not in name
        require(is_valid, f"name must be a string without a colon, got {name!r}")
        if name in registries.data:
            require_registered(registries.data, self.source)
        with must(f"{kind.__name__} must not require arguments"):
            kind()

    def splits(self) -> None:
        import datasets

        named = isinstance(self.loaded, Mapping) and all(isinstance(name, str) and name for name in self.loaded)
        require(named, f"splits must be a mapping with names as keys, got {self.loaded!r:.200}")
        require(len(self.loaded) > 0, "splits must not be empty")
        for name, split in self.loaded.items():
            kind = type(split).__name__
            require(isinstance(split, datasets.Dataset), f"split {name!r} must be a datasets.Dataset, got {kind}")
            require(len(split) > 0, f"split {name!r} must not be empty")

    def samples(self, name: str, split: datasets.Dataset) -> None:
        with must(f"Samples.of must find the samples of split {name!r}"):
            batch = next(iter(Samples.of(split).batches(1))).samples
        require(len(batch) == 1, f"split {name!r} must return one sample in a batch of one, got {len(batch)}")

    def repeatable(self) -> None:
        self._require_equal(type(self.source)().splits(self.place), "two reads")

    def missing(self) -> None:
        errors = (FileNotFoundError, ValueError)
        require_error(errors, lambda: self.source.splits(self.absent), self.absent, self.absent)

    def read_data(self) -> None:
        name = self.source.name
        skip_unless(name in registries.data, f"{name!r} is not registered")
        splits = {split: read_data(f"{name}:{self.place}", split=split) for split in self.loaded}
        self._require_equal(splits, "splits and read_data")

    def _require_equal(self, splits: Splits, sources: str) -> None:
        same = list(self.loaded) == list(splits)
        require(same, f"{sources} must return the same splits, got {list(self.loaded)} and {list(splits)}")
        for name, split in self.loaded.items():
            second, message = splits[name], f"{sources} of split {name!r}"
            require(split.features == second.features, f"{message} must have equal features")
            require(len(split) == len(second), f"{message} must be equally long, got {len(split)} and {len(second)}")
            for row, (a, b) in enumerate(zip(_stored_rows(split), _stored_rows(second), strict=True)):
                require(a == b, f"{message} differ in row {row}: {a!r:.100} and {b!r:.100}")


def _stored_rows(split: datasets.Dataset) -> Iterator[dict[str, Any]]:
    """Iterate over stored rows: lists, numbers, strings and bytes, without decoding images or audio."""
    for batch in split.with_format("arrow").iter(1000):
        yield from batch.to_pylist()
