"""Checks of the networks that a workflow runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args

from torch import nn

from hf_stitch.adapters import Adapter
from hf_stitch.adapters.prefixes import PrefixAdapter
from hf_stitch.analysis.activations import Activations
from hf_stitch.analysis.layers import layer_names
from hf_stitch.data import Samples
from hf_stitch.registry import check_name
from hf_stitch.tasks import task_of

T = TypeVar("T")
Align = Literal["tokens", "prefix"]
ALIGN: tuple[str, ...] = get_args(Align)


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


def read_by(source: Adapter, target: Adapter, align: Align, own: bool) -> Adapter:
    """Return the source, which reads the tokens of the target with ``align="prefix"``.

    Args:
        source: The source.
        target: The target.
        align: How positions of texts correspond.
        own: Whether maps also take the embedding of each token in the target.

    Raises:
        ValueError: If ``own`` is set without ``"prefix"``, or one of the networks cannot
            be aligned so.
    """
    if align == "prefix":
        return PrefixAdapter(source, target, own=own)
    if own:
        raise ValueError("own=True belongs to align='prefix': with one tokenizer the source knows the token")
    return source


def aligned(align: Align, own: bool) -> dict[str, Any]:
    """Return how texts are aligned as JSON values for a recipe; nothing with one tokenizer.

    Args:
        align: How positions of texts correspond.
        own: Whether maps also take the embedding of each token in the target.
    """
    return {} if align == "tokens" else {"align": align, "own": own}


def check_lengths(source: Adapter, *parts: Samples) -> None:
    """Check that a source with another tokenizer takes all texts, before any work is lost.

    Args:
        source: The source.
        *parts: Samples.

    Raises:
        ValueError: If a text is too long.
    """
    if isinstance(source, PrefixAdapter):
        for samples in parts:
            source.check_lengths(samples)


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


def scored_task(target: Adapter, task: str) -> str:
    """Return the task of stitched models that are scored by their logits.

    Args:
        target: The target.
        task: Name of the task; ``"auto"`` takes that of the target.

    Raises:
        UnknownNameError: If no class of stitched models is registered for the task.
        ValueError: If the target has no task, or models with its head cannot be scored (:mod:`hf_stitch.tasks`).
    """
    found = task_of(target, task)
    if found is None:
        raise ValueError(
            f"stitched models are scored by the logits of the target, but its task is {found!r}: pass task=, for "
            "example task='image-classification'"
        )
    return found


def verified_cuts(argument: str, network: Adapter, layers: Iterable[str] | None) -> tuple[str, ...]:
    """Return the layers at which a network is cut.

    Args:
        argument: Name of the argument, for error messages.
        network: The network.
        layers: Names of layers; ``None`` takes all verified cuts.

    Raises:
        NotACutError: If the network cannot be cut at one of the layers.
        TypeError: If ``layers`` is a single name.
        ValueError: If there are no layers, or one is named twice.
    """
    names = layer_names(argument, network.layers if layers is None else layers)
    for name in names:
        network.cut(name)
    return names
