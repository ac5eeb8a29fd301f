"""Check of the networks that a workflow runs."""

from __future__ import annotations

from typing import Any

from hf_stitch.analysis.activations import Activations


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
