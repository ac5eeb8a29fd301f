"""Pages of atlases: similarity of the layers of two or more networks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hf_stitch.analysis.comparison.atlas import SimilarityAtlas
from hf_stitch.analysis.comparison.networks import NetworkAtlas
from hf_stitch.reports.drawing import heat_map, layout_of, marks, strips, thinned
from hf_stitch.reports.section import Figure, Section, Table, Trace, View, key_of

MOST, LEVEL = 200, 0.05
"""Largest number of layers per side in a figure, and the level of tests."""


def layers_section(atlas: SimilarityAtlas) -> Section:
    """Describe an atlas."""
    atlases = [atlas] if atlas.weights is None else [atlas, atlas.weights]
    sides = f"{_count(atlas.layers_a)} of a to {_count(atlas.layers_b)} of b"
    notes = [gap for one_atlas in atlases for gap in one_atlas._gaps()]
    if max(len(layers) for one_atlas in atlases for layers in (one_atlas.layers_a, one_atlas.layers_b)) > MOST:
        notes.append(f"Figures show at most {MOST} evenly spaced layers per side; all values are in the data.")
    return Section(
        "Similarity of layers",
        f"How similar are {sides}, by {', '.join(atlas.metrics)} ({atlas.basis})?",
        _finding(atlas, next(iter(atlas.values))),
        [_figure(one_atlas) for one_atlas in atlases],
        notes=notes,
        recipe=atlas.recipe,
        networks=key_of(*(_weights(atlas.recipe.get(side)) for side in "ab")),
        data=(atlas.recipe.get("a") or {}).get("data"),
    )


def _count(layers: Sequence[str]) -> str:
    return f"{len(layers)} layer{'s' * (len(layers) != 1)}"


def _weights(side: Any) -> Any:
    return ((side or {}).get("reference") or {}).get("weights_hash")


def _finding(atlas: SimilarityAtlas, metric: str) -> str:
    values, test = atlas.values[metric], atlas.tests.get(metric)
    sentence = atlas.headline(metric)
    if np.isnan(values).all():
        return f"{sentence}."
    if atlas._namesakes:
        a, b = atlas.best_pair(metric)
        value = values[atlas.layers_a.index(a), atlas.layers_b.index(b)]
        sentence += f". The most similar layers are {a} of a and {b} of b ({value:.3f})"
    if metric in atlas.distances:
        sentence += ", where lower values mean more alike"
    if atlas.n is None:
        return f"{sentence}."
    if test is None:
        return f"{sentence}; without a permutation test, the best of many pairs may be high by chance."
    matches = atlas.match_p_values(metric).values()
    significant = sum(p <= LEVEL for p in matches)
    return f"{sentence}; {significant} of {len(matches)} best matches are beyond chance (p ≤ {LEVEL:g}, adjusted)."


def _figure(atlas: SimilarityAtlas) -> Figure:
    rows, columns = thinned(len(atlas.layers_a), MOST), thinned(len(atlas.layers_b), MOST)
    names = [atlas.layers_a[i] for i in rows], [atlas.layers_b[j] for j in columns]
    layout = layout_of(len(rows), len(columns), *atlas._titles)
    size_bars: list[Trace] = []
    if atlas.sizes:
        size_bars, bar_layout = _strips(atlas, names)
        layout = {key: {**layout.get(key, {}), **value} if isinstance(value, dict) else value
                  for key, value in {**layout, **bar_layout}.items()}  # fmt: skip
    views = [_view(atlas, metric, (rows, columns), names, size_bars) for metric in atlas.values]
    start = (0, 0)
    first_metric = next(iter(atlas.values))
    if not np.isnan(atlas.values[first_metric]).all():
        best = atlas.best_pair(first_metric)
        if best[0] in names[0] and best[1] in names[1]:
            start = names[0].index(best[0]), names[1].index(best[1])
    return Figure(views, layout, start, profiles=True)


def _strips(atlas: SimilarityAtlas, names: tuple[list[str], list[str]]) -> tuple[list[Trace], dict[str, Any]]:
    """Plot both networks along the axes: a bar for each layer with the length of its share of the parameters."""
    lengths, hover = [], []
    for side, layers in zip("ab", names, strict=True):
        sizes = [atlas.sizes[side][layer] for layer in layers]
        lengths.append([size.share or 0.0 for size in sizes])
        hover.append([
            f"{layer}: {size.width} features" + ("" if size.share is None else f", {size.share:.1%} of the parameters")
            for layer, size in zip(layers, sizes, strict=True)
        ])  # fmt: skip
    return strips(lengths[0], lengths[1], (hover[0], hover[1]), names)


def _view(
    atlas: SimilarityAtlas, metric: str, plotted: tuple[list[int], list[int]], names: tuple[list[str], list[str]],
    size_bars: Sequence[Trace],
) -> View:  # fmt: skip
    cells, test = np.ix_(*plotted), atlas.tests.get(metric)
    best, caption = atlas.best_matches(metric), _finding(atlas, metric)
    best_pairs = [(a, b) for a, b in best.items() if a in names[0] and b in names[1]]
    mark_traces = [marks(best_pairs, name="best match of each layer of a", symbol="square")]
    further = {}
    if test is not None:
        p_values = test.p_values[cells]
        further = {"by chance": test.chance[cells], "p, adjusted for the search": p_values}
        starred, meaning = atlas._stars(metric, LEVEL)
        stars = [(names[0][i], names[1][j]) for i, j in np.argwhere(starred[cells])]  # type: ignore[index]
        mark_traces.append(marks(stars, name=meaning, symbol="star"))
        if starred is not None and not starred.any():
            subject = "All pairs are" if (test.p_values <= LEVEL).all() else "No pair is"
            caption += f" {subject} beyond chance (p ≤ {LEVEL:g}, adjusted for the search)."
    heat = heat_map(atlas.values[metric][cells], *names, label=metric, whole=atlas.ranges.get(metric), further=further)
    columns = atlas._more_columns(metric)
    rows = [(*row, *more) for row, *more in zip(_matches(atlas, metric, best), *columns.values(), strict=True)]
    table = Table(("layer of a", "most similar layer of b", metric, *columns), rows)
    return View(metric, caption, [heat, *mark_traces, *size_bars], table)


def _matches(atlas: SimilarityAtlas, metric: str, best: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    p_values = atlas.match_p_values(metric) if metric in atlas.tests else {}
    for a in atlas.layers_a:
        if a not in best:
            yield a, "undefined", ""
            continue
        value = atlas.values[metric][atlas.layers_a.index(a), atlas.layers_b.index(best[a])]
        p_text = f", p = {p_values[a]:.3g}" if a in p_values else ""
        yield a, best[a], f"{value:.4f}{p_text}"


def networks_section(joint: NetworkAtlas) -> Section:
    """Describe the similarity of several networks."""
    atlas, networks = joint.atlas, joint.networks
    recipe = atlas.recipe.get("a") or {}
    sides = list((recipe.get("networks") or {}).values())
    return Section(
        "Similarity of networks",
        f"How similar are {len(networks)} networks with {len(atlas.layers_a)} layers, by {', '.join(atlas.metrics)} "
        f"({atlas.basis})?",
        f"{joint.headline()}.",
        [
            Figure(
                [_networks(joint, metric) for metric in atlas.values], layout_of(len(networks), len(networks), "", "")
            ),
            _layers(joint),
        ],
        notes=list(atlas._gaps()),
        recipe=atlas.recipe,
        data=sides[0].get("data") if sides else None,
    )


def _networks(joint: NetworkAtlas, metric: str) -> View:
    names, values = joint.networks, joint.similarities(metric)
    rows = [(name, *(f"{value:.4f}" for value in row)) for name, row in zip(names, values, strict=True)]
    return View(
        metric, f"{joint.headline(metric)}.", [heat_map(values, names, names, label=metric)], Table(("", *names), rows)
    )


def _layers(joint: NetworkAtlas) -> Figure:
    atlas = joint.atlas
    plotted = thinned(len(atlas.layers_a), MOST)
    names = [atlas.layers_a[index] for index in plotted]
    views = []
    for metric, values in atlas.values.items():
        best = joint.best_matches(metric)
        best_pairs = [(a, b) for a, b in best.items() if a in names and b in names]
        heat = heat_map(values[np.ix_(plotted, plotted)], names, names, label=metric)
        rows = [(a, b, f"{values[atlas.layers_a.index(a), atlas.layers_b.index(b)]:.4f}") for a, b in best.items()]
        table = Table(("layer", "most similar layer of another network", metric), rows)
        match_marks = marks(best_pairs, name="best match in another network", symbol="square")
        views.append(View(metric, f"All layers of all networks by {metric}.", [heat, match_marks], table))
    return Figure(views, layout_of(len(names), len(names), "layer", "layer"), profiles=True)
