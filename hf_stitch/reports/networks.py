"""The page of several networks: how similar they are, and which of their layers correspond."""

from __future__ import annotations

import numpy as np

from hf_stitch.analysis.comparison.networks import NetworkAtlas
from hf_stitch.reports.drawing import heat_map, layout_of, marks, thinned
from hf_stitch.reports.section import Figure, Section, Table, View
from hf_stitch.reports.similarity import MOST


def section(found: NetworkAtlas) -> Section:
    """Describe the similarity of several networks."""
    atlas, networks = found.atlas, found.networks
    recipe = atlas.recipe.get("a") or {}
    sides = list((recipe.get("networks") or {}).values())
    return Section(
        "Similarity of networks",
        f"How similar are {len(networks)} networks with {len(atlas.layers_a)} layers, by {', '.join(atlas.metrics)} "
        f"({atlas.basis})?",
        f"{found.headline()}.",
        [
            Figure(
                [_networks(found, metric) for metric in atlas.values], layout_of(len(networks), len(networks), "", "")
            ),
            _layers(found),
        ],
        notes=list(atlas._gaps()),
        recipe=atlas.recipe,
        data=sides[0].get("data") if sides else None,
    )


def _networks(found: NetworkAtlas, metric: str) -> View:
    names, values = found.networks, found.similarities(metric)
    rows = [(name, *(f"{value:.4f}" for value in row)) for name, row in zip(names, values, strict=True)]
    return View(
        metric, f"{found.headline(metric)}.", [heat_map(values, names, names, label=metric)], Table(("", *names), rows)
    )


def _layers(found: NetworkAtlas) -> Figure:
    atlas = found.atlas
    places = thinned(len(atlas.layers_a), MOST)
    names = [atlas.layers_a[place] for place in places]
    views = []
    for metric, values in atlas.values.items():
        best = found.best_matches(metric)
        shown = [(a, b) for a, b in best.items() if a in names and b in names]
        heat = heat_map(values[np.ix_(places, places)], names, names, label=metric)
        rows = [(a, b, f"{values[atlas.layers_a.index(a), atlas.layers_b.index(b)]:.4f}") for a, b in best.items()]
        table = Table(("layer", "most similar layer of another network", metric), rows)
        over = marks(shown, name="best match in another network", symbol="square")
        views.append(View(metric, f"All layers of all networks by {metric}.", [heat, over], table))
    return Figure(views, layout_of(len(names), len(names), "layer", "layer"), profiles=True)
