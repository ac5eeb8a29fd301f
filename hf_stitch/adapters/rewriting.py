"""Rewrites: changes of the modules of a network that a saved model repeats when it is loaded."""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar, Protocol

from torch import nn

from hf_stitch.adapters.untrusted import weightless
from hf_stitch.options import Configured
from hf_stitch.reference import Settings
from hf_stitch.registry import registries

ATTRIBUTE = "hf_stitch_rewrites"
"""Attribute of a network: the list of the records of its rewrites, in the order in which they were applied."""

REWRITES = "rewrites"
"""Key of the same list in a blueprint."""


class Recorder(Protocol):
    """What records of networks need of their library."""

    name: ClassVar[str]

    def blueprint(self, model: nn.Module) -> dict[str, Any]:
        """Return a description from which the network is built again."""

    def settings(self, model: nn.Module) -> Settings:
        """Return what a forward reads of the config."""


@dataclasses.dataclass(frozen=True)
class Rewrite(Configured, ABC):
    """Base class of rewrites: frozen dataclasses that exchange modules of a network for others.

    The fields of a rewrite are its options, which are JSON values, checked against their annotations
    (:class:`hf_stitch.options.Configured`); JSON has lists, but no tuples. :func:`rewrite` applies a rewrite and
    records it: the blueprint of the network then contains it, and a stitched model with a half of this network can be
    saved and loaded.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class WithoutDropout(Rewrite):
        ...     name = "without_dropout"
        ...
        ...     def apply(self, model):
        ...         for name, module in list(model.named_modules()):
        ...             if isinstance(module, nn.Dropout):
        ...                 model.set_submodule(name, nn.Identity())
        >>> network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 2))
        >>> rewrite(network, WithoutDropout())
        >>> network[1], rewrites_of(network)
        (Identity(), [{'name': 'without_dropout'}])
    """

    @abstractmethod
    def apply(self, model: nn.Module) -> None:
        """Exchange modules of a network in place.

        Which modules, and the names and shapes of the new tensors, may depend on the options and on the names, classes
        and shapes of the network only, not on the values of its weights: a saved model is rebuilt without values, and
        its tensors may be on the meta device. New tensors have the device and the dtype of those they replace.
        """


def rewrite(model: nn.Module, change: str | Mapping[str, Any] | Rewrite) -> None:
    """Apply a rewrite to a network in place, and record it on the network.

    Args:
        model: The network. Create its adapter afterwards: an adapter that ran it knows its old modules.
        change: The rewrite, its name in ``hf_stitch.registries.rewrites`` (also with options, ``"name:key=value"``),
            or its record.

    Example:
        >>> class Halved(Rewrite):
        ...     name = "halved"
        ...
        ...     def apply(self, model):
        ...         model.set_submodule("1", nn.Linear(4, 2))
        >>> network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> rewrite(network, Halved())
        >>> network[1].out_features
        2
    """
    built = registries.rewrites.build(change)
    record = json.loads(json.dumps(built.to_dict()))
    built.apply(model)
    setattr(model, ATTRIBUTE, [*rewrites_of(model), record])


def rewrites_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return the records of the rewrites of a network, in the order in which they were applied.

    Args:
        model: The network.

    Example:
        >>> rewrites_of(nn.Linear(2, 2))
        []
    """
    return list(getattr(model, ATTRIBUTE, ()))


def blueprint_of(model: nn.Module, library: Recorder) -> dict[str, Any]:
    """Return the blueprint of a network, with the name of its library and its rewrites."""
    found = rewrites_of(model)
    return {"library": library.name, **library.blueprint(model), **({REWRITES: found} if found else {})}


def settings_of(model: nn.Module, library: Recorder) -> Settings:
    """Return the settings of a network with its rewrites."""
    settings, found = library.settings(model), rewrites_of(model)
    if found:
        settings = dataclasses.replace(settings, chosen=settings.chosen | Settings.of({REWRITES: found}).chosen)
    return settings


def network_of(blueprint: Mapping[str, Any]) -> nn.Module:
    """Construct the network of a blueprint, which may be untrusted, in eval mode, and repeat its rewrites.

    Raises:
        UnknownNameError: If a library or a rewrite is not installed.
    """
    own = {key: value for key, value in blueprint.items() if key != REWRITES}
    model: nn.Module = registries.adapters.get(blueprint["library"])().build(own)
    for record in blueprint.get(REWRITES, ()):
        rewrite(model, record)
    return model.eval()


def recorded(blueprint: Mapping[str, Any], model: nn.Module) -> nn.Module:
    """Return the network of the blueprint of a model, without weights and only to compare the model with.

    It is built once for all models of one blueprint, since every job compares its networks several times; one that
    needs code of plugins or users is built again, since that may have changed.
    """
    text = json.dumps(blueprint)
    if f'"{REWRITES}"' in text:
        return network_of(blueprint)
    classes = frozenset(type(module) for module in model.modules())  # a notebook may define them again
    return _skeleton(text, classes)


@lru_cache(maxsize=8)
def _skeleton(blueprint: str, classes: frozenset[type]) -> nn.Module:
    with weightless():
        return network_of(json.loads(blueprint))
