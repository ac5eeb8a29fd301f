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
"""Attribute of a network: list of the records of its rewrites, in order of application."""

REWRITES = "rewrites"
"""Key of this list in a blueprint."""


class Recorder(Protocol):
    """Protocol of a library for recording networks."""

    name: ClassVar[str]

    def blueprint(self, model: nn.Module) -> dict[str, Any]:
        """Return a description to rebuild the network."""

    def settings(self, model: nn.Module) -> Settings:
        """Return the config values that a forward reads."""


@dataclasses.dataclass(frozen=True)
class Rewrite(Configured, ABC):
    """Base class of rewrites: frozen dataclasses that replace modules of a network.

    The fields of a rewrite are its options: JSON values (lists, not tuples) that are checked against their annotations
    (:class:`hf_stitch.options.Configured`). :func:`rewrite` applies a rewrite and records it in the blueprint of the
    network, so that a stitched model with a half of this network can be saved and loaded.

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
        """Replace modules of a network in place.

        The modules, and the names and shapes of the new tensors, may depend only on the options and on the names,
        classes and shapes of the network, not on the values of its weights: a saved model is rebuilt without values,
        and its tensors may be on the meta device. New tensors have the device and dtype of the replaced tensors.
        """


def rewrite(model: nn.Module, change: str | Mapping[str, Any] | Rewrite) -> None:
    """Apply a rewrite to a network in place, and record it on the network.

    Args:
        model: The network. Create its adapter afterwards: an existing adapter caches the old modules.
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
    instance = registries.rewrites.build(change)
    record = json.loads(json.dumps(instance.to_dict()))
    instance.apply(model)
    setattr(model, ATTRIBUTE, [*rewrites_of(model), record])


def rewrites_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return the records of the rewrites of a network, in order of application.

    Args:
        model: The network.

    Example:
        >>> rewrites_of(nn.Linear(2, 2))
        []
    """
    return list(getattr(model, ATTRIBUTE, ()))


def blueprint_of(model: nn.Module, library: Recorder) -> dict[str, Any]:
    """Return the blueprint of a network, with the name of its library and its rewrites."""
    rewrites = rewrites_of(model)
    return {"library": library.name, **library.blueprint(model), **({REWRITES: rewrites} if rewrites else {})}


def settings_of(model: nn.Module, library: Recorder) -> Settings:
    """Return the settings of a network with its rewrites."""
    settings, rewrites = library.settings(model), rewrites_of(model)
    if rewrites:
        settings = dataclasses.replace(settings, chosen=settings.chosen | Settings.of({REWRITES: rewrites}).chosen)
    return settings


def network_of(blueprint: Mapping[str, Any]) -> nn.Module:
    """Build the network of a blueprint, which may be untrusted, with its rewrites and in eval mode.

    Raises:
        UnknownNameError: If a library or a rewrite is not installed.
    """
    plain_blueprint = {key: value for key, value in blueprint.items() if key != REWRITES}
    model: nn.Module = registries.adapters.get(blueprint["library"])().build(plain_blueprint)
    for record in blueprint.get(REWRITES, ()):
        rewrite(model, record)
    return model.eval()


def recorded(blueprint: Mapping[str, Any], model: nn.Module) -> nn.Module:
    """Return the network of the blueprint of a model without weights, for comparison with the model.

    The network is cached, because every job compares its networks several times. It is rebuilt if it uses code of
    plugins or users, because this code may have changed.
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
