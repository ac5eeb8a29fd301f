"""Sources of data sets beside the Hub and folders: :class:`DataSource`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import datasets


class DataSource(ABC):
    """Reader of data sets of one format, service or library: :func:`read_data` calls it for ``name:place``.

    A source is registered in ``hf_stitch.registries.data``, by a plugin with an entry point in ``hf_stitch.data``. All
    commands that take ``--data`` then take ``name:place``. What it reads needs a column of images or of texts, and may
    have a column of labels; give it the features ``Image``, ``Value("string")`` and ``ClassLabel``, so that
    :meth:`hf_stitch.Samples.of` finds these columns.

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
        """Read a data set.

        Args:
            place: What stands behind ``name:``, for example a path or the name of a data set.

        Returns:
            Name of the split -> its samples, always in the same order.

        Raises:
            FileNotFoundError: If there is no such data set.
            ValueError: If ``place`` is no name of a data set of this source.
        """
