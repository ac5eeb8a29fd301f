"""Comparison of the class names of labelled data with the class names of a network."""

from __future__ import annotations

import re
from typing import Any

from hf_stitch.data import Samples
from hf_stitch.printing import warn


def numbered_as(samples: Samples, config: Any) -> Samples:
    """Return samples with labels numbered as the classes of a network, if both name their classes.

    Datasets and networks may list the same classes in different orders: a folder of images lists them alphabetically, a
    network as in its training data. Case is ignored, and spaces, hyphens and underscores count as one space. A warning
    is issued if the numbers change, or if several columns could be the labels: the samples then count as unlabelled.
    Classes are matched if one side has all class names of the other; classes that the network lacks receive numbers
    after its own. Otherwise, labels are unchanged.
    """
    if samples.undecided:
        warn(f"{samples.undecided}. Until then, the samples count as unlabelled")
        return samples.unlabelled()
    names, network_names = samples.label_names, _names_of(config)
    if not names or not network_names:
        return samples
    number_by_name = {_plain(name): index for index, name in enumerate(network_names)}
    only_in_data = [name for name in names if _plain(name) not in number_by_name]
    each_has_more = bool(only_in_data) and len(network_names) > len(names) - len(only_in_data)
    if each_has_more or len(number_by_name) < len(network_names):  # second: look-alike names in the network
        return samples
    number_by_name |= {_plain(name): len(network_names) + index for index, name in enumerate(only_in_data)}
    numbers = [number_by_name[_plain(name)] for name in names]
    if len(set(numbers)) < len(numbers) or numbers == list(range(len(names))):
        return samples
    warn(
        f"the classes of the data ({_listed(names)}) have another order than the classes of the network "
        f"({_listed(network_names)}): labels are matched by name"
    )
    return samples.renumbered(numbers, (*network_names, *only_in_data))


def warn_of_other_classes(samples: Samples, config: Any) -> None:
    """Warn if the classes of labels differ from the classes of a network.

    Names are compared as in :func:`numbered_as`. Synonyms such as ``NEG`` and ``negative`` count as different.
    """
    names, network_names = samples.label_names or (), _names_of(config)
    if any(_plain(name) != _plain(network_name) for name, network_name in zip(names, network_names, strict=False)):
        warn(
            f"the data have the {len(names)} classes {_listed(names)}, but the network has the {len(network_names)} "
            f"classes {_listed(network_names)}: labels are compared by number, so accuracies may be meaningless. Pass "
            "another column of labels, Samples.of(data, label=…) (--label), or rename the classes as in the network"
        )


def _names_of(config: Any) -> tuple[str, ...]:
    """Return the class names of a network; empty without names, or if the names are only numbers."""
    id2label = getattr(config, "id2label", None) or {}
    names = tuple(str(id2label.get(index, "")) for index in range(len(id2label)))
    return () if all(name in ("", f"LABEL_{index}") for index, name in enumerate(names)) else names


def _plain(name: str) -> str:
    """Return a name in lower case, with one space for each run of spaces, hyphens and underscores."""
    return re.sub(r"[\s_-]+", " ", name).strip().casefold()


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
