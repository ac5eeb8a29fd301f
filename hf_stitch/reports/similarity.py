"""The page of an atlas: how similar each layer of one network is to each layer of another."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hf_stitch.analysis.comparison.atlas import SimilarityAtlas
from hf_stitch.reports.drawing import heat_map, layout_of, marks, thinned
from hf_stitch.reports.section import Figure, Section, Table, Trace

MOST, LEVEL = 200, 0.05
"""Layers of a side that a figure shows, and the level of tests."""


def section(atlas: SimilarityAtlas) -> Section:
    """Describe an atlas.

    Args:
        atlas: The atlas.
    """
    sides = f"{len(atlas.layers_a)} layers of a to each of {len(atlas.layers_b)} layers of b"
    asked = f"How similar are {sides}, by {', '.join(atlas.values)} ({atlas.basis})?"
    figures = [_figure(atlas, metric) for metric in atlas.values]
    verdict = _finding(atlas, next(iter(atlas.values)))
    notes = list(atlas._gaps())
    if max(len(atlas.layers_a), len(atlas.layers_b)) > MOST:
        notes.append(f"Figures show {MOST} layers of a side at most, evenly spaced; all values are in the data.")
    if atlas.weights is not None:
        figures += [_figure(atlas.weights, metric) for metric in atlas.weights.values]
        notes += list(atlas.weights._gaps())
    return Section("Similarity of layers", asked, verdict, figures, notes, atlas.recipe)


def _finding(atlas: SimilarityAtlas, metric: str) -> str:
    values, test = atlas.values[metric], atlas.tests.get(metric)
    if np.isnan(values).all():
        return f"{metric} is undefined for all pairs of layers."
    a, b = atlas.best_pair(metric)
    value = values[atlas.layers_a.index(a), atlas.layers_b.index(b)]
    sentence = f"The most similar layers by {metric} are {a} of a and {b} of b ({value:.3f})"
    if test is None:
        return f"{sentence}; no permutation test was run, so that the best of many pairs may be high by chance."
    matches = atlas.match_p_values(metric).values()
    survive = sum(p <= LEVEL for p in matches)
    return f"{sentence}; {survive} of {len(matches)} best matches are beyond chance (p ≤ {LEVEL:g}, adjusted)."


def _figure(atlas: SimilarityAtlas, metric: str) -> Figure:
    rows, columns = thinned(len(atlas.layers_a), MOST), thinned(len(atlas.layers_b), MOST)
    names = [atlas.layers_a[i] for i in rows], [atlas.layers_b[j] for j in columns]
    values, test = atlas.values[metric][np.ix_(rows, columns)], atlas.tests.get(metric)
    p_values = None if test is None else test.p_values[np.ix_(rows, columns)]
    low, high = (float(end) if np.isfinite(end) else None for end in atlas.ranges.get(metric, (np.nan, np.nan)))
    best = atlas.best_matches(metric)
    shown = [(a, b) for a, b in best.items() if a in names[0] and b in names[1]]
    over = [marks(shown, name="best match of each layer of a", symbol="square-open")]
    if p_values is not None:
        stars = [(names[0][i], names[1][j]) for i, j in np.argwhere(p_values <= LEVEL)]
        over.append(marks(stars, name=f"p ≤ {LEVEL:g}, adjusted for the search", symbol="star"))

    def view(*ends: float | None) -> list[Trace]:
        return [heat_map(values, *names, label=metric, low=ends[0], high=ends[1], p_values=p_values), *over]

    views = {"colours over the values": view(None, None)}
    if low is not None and high is not None:
        views = {f"colours from {low:.3g} to {high:.3g}": view(low, high), **views}
    titles = atlas._titles
    layout = layout_of(len(rows), len(columns), *titles)
    lower = " Lower values mean more alike." if metric in atlas.distances else ""
    table = Table(("layer of a", "most similar layer of b", metric), list(_matches(atlas, metric, best)))
    return Figure(_finding(atlas, metric) + lower, views, layout, table, profiles=True)


def _matches(atlas: SimilarityAtlas, metric: str, best: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    p_values = atlas.match_p_values(metric) if metric in atlas.tests else {}
    for a in atlas.layers_a:
        if a not in best:
            yield a, "undefined", ""
            continue
        value = atlas.values[metric][atlas.layers_a.index(a), atlas.layers_b.index(best[a])]
        tested = f", p = {p_values[a]:.3g}" if a in p_values else ""
        yield a, best[a], f"{value:.4f}{tested}"
