"""The classes of data and of a network, matched by name."""

from __future__ import annotations

import re
from typing import Any

from hf_stitch.data import Samples
from hf_stitch.printing import warn


def numbered_as(samples: Samples, config: Any) -> Samples:
    """Number the labels of samples as the classes of a network, if both name their classes.

    Data sets and networks may list the same classes in different orders: a folder of images lists them alphabetically,
    a network as it was trained. Case, spaces, hyphens and underscores of a name do not matter. A warning is given if
    the numbers change, or if several columns could be the labels: the samples then count as unlabelled. Classes are
    matched if the data or the network have all names of the other; classes that the network lacks then get numbers
    behind its own. Otherwise, labels stay as they are.
    """
    if samples.undecided:
        warn(f"{samples.undecided}. Until then, the samples count as without labels")
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
        f"the classes of the data ({_listed(names)}) are not numbered as those of the network ({_listed(theirs)}): "
        "labels are matched by name"
    )
    return samples.renumbered(numbers, (*theirs, *others))


def warn_of_other_classes(samples: Samples, config: Any) -> None:
    """Warn if samples are labelled with other classes than those of a network.

    Names decide, as in :func:`numbered_as`. Names that mean the same, ``NEG`` and ``negative``, count as others.
    """
    names, theirs = samples.label_names, _names_of(config)
    if names and theirs and any(_plain(own) != _plain(name) for own, name in zip(names, theirs, strict=False)):
        warn(
            f"the data have the {len(names)} classes {_listed(names)}, and the network has the {len(theirs)} classes "
            f"{_listed(theirs)}: labels are compared by number, so that accuracies mean nothing unless each number is "
            "the same class. Name another column of labels, Samples.of(data, label=…) (--label), or give the classes "
            "the names of the network"
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
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
