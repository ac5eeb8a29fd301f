"""Checks of the networks that a workflow runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from hf_stitch.adapters.naming import layer_names
from hf_stitch.analysis.activations import Activations
from hf_stitch.registry import check_name

T = TypeVar("T")


def check_runs(**networks: Any) -> None:
    """Check that none of the arguments is saved activations, which no half of a network can be taken from.

    Args:
        **networks: What was given, by the name of the argument.

    Raises:
        TypeError: If one of them is :class:`hf_stitch.Activations`; the message names the argument.
    """
    for name, given in networks.items():
        if isinstance(given, Activations):
            raise TypeError(
                f"{name} must be a network, got Activations: a stitched model runs both networks. To fit a map of "
                "saved activations, use a matcher, for example hf_stitch.matchers.Ridge().fit(moments) with "
                "moments = hf_stitch.Moments(dx, dy).update(x, y); hf_stitch.compare takes Activations"
            )


def named_networks(networks: Mapping[str, T] | Sequence[T]) -> dict[str, T]:
    """Return several networks by name.

    Args:
        networks: Name -> network, or a list, whose networks are named ``0``, ``1``, ….

    Raises:
        TypeError: If it is a single network or name.
    """
    if not isinstance(networks, Iterable) or isinstance(networks, str | nn.Module):
        shown = repr(networks) if isinstance(networks, str) else type(networks).__name__
        raise TypeError(f"networks must be a list of networks, or a dict of names and networks, got {shown} alone")
    if not networks:
        raise ValueError("networks must contain at least one network, got none")
    if isinstance(networks, Mapping):
        check_name(**{f"name {place} of networks": name for place, name in enumerate(networks)})
    return dict(networks) if isinstance(networks, Mapping) else {str(i): each for i, each in enumerate(networks)}


def named_layers(
    names: Collection[str], layers: Mapping[str, Iterable[str]] | Iterable[str] | None
) -> dict[str, tuple[str, ...]]:
    """Return the layers of several networks, as far as they are given.

    Args:
        names: Names of the networks.
        layers: Layers of all networks, or name -> layers; ``None`` for none.

    Raises:
        TypeError: If the layers are a single name.
        ValueError: If there is no network of a name, there are no layers, or one is named twice.
    """
    if layers is None:
        return {}
    if not isinstance(layers, Mapping):
        return dict.fromkeys(names, layer_names("layers", layers))
    if unknown := sorted(layers.keys() - names):
        raise ValueError(f"layers names {', '.join(unknown)}, but the networks are {', '.join(names)}")
    return {name: layer_names("layers", own) for name, own in layers.items()}
