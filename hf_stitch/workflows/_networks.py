"""Checks of the networks that a workflow runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hf_stitch.adapters import Adapter
from hf_stitch.analysis.activations import Activations
from hf_stitch.analysis.layers import layer_names
from hf_stitch.artefacts.heads import class_for


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


def scored_task(target: Adapter, task: str) -> str:
    """Return the task of stitched models that are scored by their logits.

    Args:
        target: The target.
        task: Name of the task; ``"auto"`` takes that of the target.

    Raises:
        UnknownNameError: If no class of stitched models is registered for the task.
        ValueError: If the target has no task, or models of the task have no logits.
    """
    found = target.task if task == "auto" else task
    if found is None or class_for(found).task is None:
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
