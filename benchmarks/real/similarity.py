"""Similarity of trained networks: exact cuts, and whether similar layers lie at the same relative depth."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np

import hf_stitch
from benchmarks import exactness
from benchmarks.real import data, networks
from benchmarks.real.places import QUIET, Places
from hf_stitch.adapters import untrained

TEXTS, IMAGES, SOUNDS = ("MiniLM", "E5"), ("lite0", "lite1", "lite2"), ("CREPE tiny", "CREPE full")
PUBLISHED = ("Tiny-10 0", "Tiny-10 1", "ResNet-20 0", "ResNet-20 1")


def cuts(places: Places, name: str) -> dict[str, Any]:
    """List all cuts of a network, and check each bit for bit with code outside of the library."""
    network = places.network(name)
    for layer in network.layers:
        exactness.check(network, (layer,))
    weights = sum(parameter.numel() for parameter in network.model.parameters())
    outcome = f"{type(network.model).__name__}, {weights:,} weights: {len(network.layers)} cuts, all exact"
    return {"outcome": outcome, "holds": len(network.layers) > 1, "layers": network.layers, "weights": weights}


def compared(places: Places, a: str, b: str, samples: int = 300) -> dict[str, Any]:
    """Compare all cuts; best matches must lie closer in relative depth than by chance and with an untrained twin of b.

    The distance in depth is 0 if the best match of every layer lies at the same share of the depth.
    """
    first, second = places.network(a), places.network(b)
    inputs = data.samples(places.kind(a), places.data, samples)
    distance, highest = {}, {}
    for twin, other in (("trained", second), ("untrained", untrained(second))):
        atlas = hf_stitch.compare(
            first, other, inputs, layers_a=first.layers, layers_b=other.layers,
            metrics=["linear_cka:debiased=True"], **QUIET,
        )  # fmt: skip
        values = np.asarray(atlas[atlas.metrics[0]])
        depth_a, depth_b = (np.linspace(0, 1, size) for size in values.shape)
        distance[twin] = float(np.abs(depth_b[np.nanargmax(values, 1)] - depth_a).mean())
        highest[twin] = float(np.nanmax(values))
    chance = float(np.abs(depth_b[None] - depth_a[:, None]).mean())
    return {
        "outcome": f"best matches lie {distance['trained']:.2f} of the depth away (untrained "
        f"{distance['untrained']:.2f}, chance {chance:.2f}); highest CKA {highest['trained']:.2f} "
        f"(untrained {highest['untrained']:.2f})",
        "holds": distance["trained"] < min(chance, distance["untrained"]),
        "distance": distance, "chance": chance, "highest": highest,
    }  # fmt: skip


ROWS: dict[str, tuple[Any, ...]] = {
    **{f"cuts: {name}": (cuts, name) for name in (*networks.NETWORKS, *PUBLISHED)},
    **{
        f"compare: {a} and {b}": (compared, a, b)
        for group in (TEXTS, IMAGES, SOUNDS, PUBLISHED)
        for a, b in combinations(group, 2)
    },
}
