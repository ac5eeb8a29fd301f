"""Conformance check for sources of data sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from hf_stitch.data import DataSource, Samples, read_data
from hf_stitch.registry import registries
from hf_stitch.testing._require import require, skip_unless
from hf_stitch.testing.conformance import conformance

if TYPE_CHECKING:
    import datasets

ABSENT = "no-such-place"


@conformance
def check_data_source(
    source: str | type[DataSource] | DataSource, place: str, missing: str | None = None
) -> Iterator[tuple[str, Callable[[], None]]]:
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

    Raises:
        AssertionError: The contract is violated; the message names the violation.

    Example:
        >>> check_data_source("sklearn", "digits")
    """

    @cache
    def built() -> DataSource:
        if isinstance(source, type):
            return source()
        return registries.data.build(source)

    @cache
    def splits() -> Mapping[str, datasets.Dataset]:
        return built().splits(place)

    yield "name", lambda: _check_name(built())
    yield "splits", lambda: _check_splits(splits())
    yield "samples", lambda: _check_samples(splits())
    yield "repeatable", lambda: _check_equal(splits(), _another(built()).splits(place), "two readings")
    yield "missing", lambda: _check_missing(built(), ABSENT if missing is None else missing)
    yield "read_data", lambda: _check_read_data(built(), place, splits())


def _check_name(source: DataSource) -> None:
    name = getattr(source, "name", None)
    plain = isinstance(name, str) and name != "" and ":" not in name
    require(plain, f"name must be text without a colon, got {name!r}")
    if name in registries.data:
        registered = registries.data.get(str(name))
        require(registered is type(source), f"{name!r} is registered as {registered}, not as {type(source)}")
    try:
        _another(source)
    except TypeError as error:
        raise AssertionError(f"{type(source).__name__} must need no arguments: {error}") from error


def _another(source: DataSource) -> DataSource:
    return type(source)()


def _check_splits(splits: Mapping[str, datasets.Dataset]) -> None:
    import datasets

    named = isinstance(splits, Mapping) and all(isinstance(name, str) and name for name in splits)
    require(named, f"splits must be a mapping from names, got {splits!r:.200}")
    require(len(splits) > 0, "there must be at least one split")
    for name, split in splits.items():
        kind = type(split).__name__
        require(isinstance(split, datasets.Dataset), f"split {name!r} must be a datasets.Dataset, got {kind}")
        require(len(split) > 0, f"split {name!r} must not be empty")


def _check_samples(splits: Mapping[str, datasets.Dataset]) -> None:
    for name, split in splits.items():
        try:
            samples = Samples.of(split)
            found = next(iter(samples.batches(1))).samples
        except (TypeError, ValueError) as error:
            raise AssertionError(f"Samples.of must find the samples of split {name!r}, got {error}") from error
        require(len(found) == 1, f"split {name!r} must give one sample in a batch of one, got {len(found)}")


def _check_equal(splits: Mapping[str, datasets.Dataset], others: Mapping[str, datasets.Dataset], what: str) -> None:
    require(list(splits) == list(others), f"{what} must give the same splits, got {list(splits)} and {list(others)}")
    for name, split in splits.items():
        other = others[name]
        require(split.features == other.features, f"{what} of split {name!r} must have equal features")
        require(len(split) == len(other), f"{what} of split {name!r} have {len(split)} and {len(other)} samples")
        for row, (one, two) in enumerate(zip(_stored(split), _stored(other), strict=True)):
            require(one == two, f"{what} of split {name!r} differ in row {row}: {one!r:.100} and {two!r:.100}")


def _stored(split: datasets.Dataset) -> Iterator[dict[str, Any]]:
    """Iterate over rows as they are stored: lists, numbers, texts and bytes, with no image or sound decoded."""
    for batch in split.with_format("arrow").iter(1000):
        yield from batch.to_pylist()


def _check_missing(source: DataSource, place: str) -> None:
    try:
        found = source.splits(place)
    except (FileNotFoundError, ValueError) as error:
        require(place in str(error), f"the error on a place that does not exist must name {place}: {error}")
        return
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        raise AssertionError(
            f"a place that does not exist must raise FileNotFoundError or ValueError, got {got}"
        ) from error
    raise AssertionError(f"{place} must raise FileNotFoundError or ValueError; it gave {found!r:.200}")


def _check_read_data(source: DataSource, place: str, splits: Mapping[str, datasets.Dataset]) -> None:
    skip_unless(source.name in registries.data, f"{source.name!r} is not registered")
    _check_equal(
        splits, {name: read_data(f"{source.name}:{place}", split=name) for name in splits}, "splits and read_data"
    )
