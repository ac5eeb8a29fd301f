"""The classes of data and of a network, matched by name."""

from __future__ import annotations

import re
import warnings
from typing import Any

from hf_stitch.data import Samples

CLASSIFIES = ("image-classification", "text-classification")
"""Tasks whose labels are classes of the network."""


def numbered_as(samples: Samples, config: Any) -> Samples:
    """Number the labels of samples as the classes of a network, if both name their classes.

    Data sets and networks may list the same classes in different orders: a folder of images lists them alphabetically,
    a network as it was trained. Case, spaces, hyphens and underscores of a name do not matter. A warning is given if
    the numbers change, or if several columns could be the labels: the samples then count as unlabelled. Labels without
    names, and names that the network does not have, stay as they are.

    Args:
        samples: Raw samples. They need no labels.
        config: Config of the network, with the names in ``id2label``; names such as ``LABEL_0`` are none.

    Returns:
        The samples, with their labels numbered as the classes of the network.

    Example:
        >>> import transformers
        >>> from datasets import ClassLabel, Dataset, Features, Value
        >>> kinds = Features(text=Value("string"), label=ClassLabel(names=["cat", "dog"]))
        >>> samples = Samples.of(Dataset.from_dict({"text": ["miaow"], "label": [0]}, features=kinds))
        >>> config = transformers.BertConfig(id2label={0: "Dog", 1: "Cat"})
        >>> numbered_as(samples, config).labels
        [1]
    """
    if samples.undecided:
        warnings.warn(f"{samples.undecided}. Until then, the samples count as without labels", stacklevel=3)
        return samples.unlabelled()
    names, theirs = samples.label_names, _names_of(config)
    if not names or not theirs:
        return samples
    place = {_plain(name): index for index, name in enumerate(theirs)}
    numbers = [place.get(_plain(name), -1) for name in names]
    if -1 in numbers or len(set(numbers)) < len(numbers) or len(place) < len(theirs):
        return samples
    if numbers == list(range(len(theirs))):
        return samples
    warnings.warn(
        f"the classes of the data ({_listed(names)}) are not numbered as those of the network ({_listed(theirs)}): "
        "labels are matched by name",
        stacklevel=3,
    )
    return samples.renumbered(numbers, theirs)


def warn_of_other_classes(samples: Samples, config: Any) -> None:
    """Warn if samples are labelled with other classes than those of a network.

    There are others if their number differs and the names too, or if both have a name with different numbers. Other
    names alone are none: ``NEG`` and ``negative`` may mean the same.

    Args:
        samples: Samples from :func:`numbered_as`.
        config: Config of the network.
    """
    names, theirs = samples.label_names, _names_of(config)
    if not names or not theirs or tuple(names) == theirs:
        return
    place = {_plain(name): index for index, name in enumerate(theirs)}
    moved = any(place.get(_plain(name), index) != index for index, name in enumerate(names))
    if moved or len(names) != len(theirs):
        warnings.warn(
            f"the data have the {len(names)} classes {_listed(names)}, and the network has the {len(theirs)} classes "
            f"{_listed(theirs)}: labels are compared by number, so that accuracies mean little. Name another column of "
            "labels, Samples.of(data, label=…) (--label), or give the classes the names of the network",
            stacklevel=3,
        )


def _names_of(config: Any) -> tuple[str, ...]:
    """Return the names of the classes of a network; empty without, or if they are only numbers."""
    found = getattr(config, "id2label", None) or {}
    names = tuple(str(found.get(index, "")) for index in range(len(found)))
    return () if all(name in ("", f"LABEL_{index}") for index, name in enumerate(names)) else names


def _plain(name: str) -> str:
    """Return a name without case, spaces, hyphens and underscores."""
    return re.sub(r"[\s_-]+", " ", name).strip().casefold()


def _listed(names: tuple[str, ...]) -> str:
    """Return the first names of a list."""
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
