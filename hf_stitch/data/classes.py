"""Matching of the classes of data and of a network by name."""

from __future__ import annotations

import re
from typing import Any

from hf_stitch.data import Samples
from hf_stitch.printing import warn


def numbered_as(samples: Samples, config: Any) -> Samples:
    """Number the labels of samples as the classes of a network, if both name their classes.

    Datasets and networks may list the same classes in different orders: a folder of images lists them alphabetically, a
    network as in its training data. Case, spaces, hyphens and underscores of a name are ignored. A warning is issued if
    the numbers change, or if several columns could be the labels: the samples then count as unlabelled. Classes are
    matched if one side has all class names of the second; classes that the network lacks receive numbers after its own.
    Otherwise, labels are unchanged.
    """
    if samples.undecided:
        warn(f"{samples.undecided}. Until then, the samples count as unlabelled")
        return samples.unlabelled()
    names, theirs = samples.label_names, _names_of(config)
    if not names or not theirs:
        return samples
    place = {_plain(name): index for index, name in enumerate(theirs)}
    others = [name for name in names if _plain(name) not in place]
    if (others and len(others) > len(names) - len(theirs)) or len(place) < len(theirs):
        return samples
    place |= {_plain(name): len(theirs) + index for index, name in enumerate(others)}
    numbers = [place[_plain(name)] for name in names]
    if len(set(numbers)) < len(numbers) or numbers == list(range(len(names))):
        return samples
    warn(
        f"the classes of the data ({_listed(names)}) have another order than the classes of the network "
        f"({_listed(theirs)}): labels are matched by name"
    )
    return samples.renumbered(numbers, (*theirs, *others))


def warn_of_other_classes(samples: Samples, config: Any) -> None:
    """Warn if the classes of labels differ from the classes of a network.

    Names are compared as in :func:`numbered_as`. Synonyms such as ``NEG`` and ``negative`` count as different.
    """
    names, theirs = samples.label_names, _names_of(config)
    if names and theirs and any(_plain(ours) != _plain(name) for ours, name in zip(names, theirs, strict=False)):
        warn(
            f"the data have the {len(names)} classes {_listed(names)}, but the network has the {len(theirs)} classes "
            f"{_listed(theirs)}: labels are compared by number, so accuracies may be meaningless. Pass another column "
            "of labels, Samples.of(data, label=…) (--label), or rename the classes as in the network"
        )


def _names_of(config: Any) -> tuple[str, ...]:
    """Return the class names of a network; empty without names, or if the names are only numbers."""
    id2label = getattr(config, "id2label", None) or {}
    names = tuple(str(id2label.get(index, "")) for index in range(len(id2label)))
    return () if all(name in ("", f"LABEL_{index}") for index, name in enumerate(names)) else names


def _plain(name: str) -> str:
    """Return a name without case, spaces, hyphens and underscores."""
    return re.sub(r"[\s_-]+", " ", name).strip().casefold()


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
